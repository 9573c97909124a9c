"""Requests of every shape that the server's own schema allows, and of shapes that it does not."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from serve_cases import restore


def shortened(body):
    """The same body, but without many long samples or long waits for a trainer that never comes."""
    if not isinstance(body, dict):
        return body
    if "master_address" in body:
        body = body | {"timeout_s": 1}
    limits = {"n": 2, "max_tokens": 4, "max_completion_tokens": 4}
    body = {name: shortened(value) if name == "sampling_params" else value for name, value in body.items()}
    long = {name for name, most in limits.items() if isinstance(body.get(name), int) and body[name] > most}
    unlimited = {name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is None}
    return body | {name: limits[name] for name in long | unlimited}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_a_fault_of_the_server(url, http, mode):
    import schemathesis  # seconds, in every process that collects the tests

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")

    def answers(case):
        http.post("/resume")  # generation waits while the server is paused
        case.body = shortened(case.body)
        reply = case.call(headers=dict(http.headers), timeout=60)
        assert reply.status_code < 500, (case, reply.text)

    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        with suppress(Unsatisfiable):  # a route that takes nothing has no wrong requests
            settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))(
                given(cases)(answers)
            )()
    restore(http)
