"""What the load of an engine says about the requests that it has room for."""

import pytest

from tailrace.contracts.engine import Usage


@pytest.mark.parametrize(
    ("usage", "num_fitting"),
    [
        (Usage(), 8),
        (Usage(num_running=2, kv_tokens=100), 8),  # it does not know the size of its cache
        (Usage(num_running=2, kv_tokens=10, kv_capacity=100), 8),
        (Usage(num_running=2, kv_tokens=30, kv_capacity=100), 6),
        (Usage(num_running=3, num_waiting=4, kv_tokens=100, kv_capacity=100), 3),
    ],
)
def test_an_engine_has_room_for_as_many_requests_as_its_slots_and_its_cache_hold(
    usage: Usage, num_fitting: int
) -> None:
    assert usage.num_fitting(slots=8) == num_fitting
