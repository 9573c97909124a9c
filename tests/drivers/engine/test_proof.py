"""Each fault in the way of weights is found by the first probe after it and named, by an embedded engine in
its process; and what a prover makes of answers."""

import asyncio
from pathlib import Path

import pytest

from helpers.faults import ADAPTER_FAULTS, FAULTS, arrivals
from helpers.processes import DEADLINE_S
from helpers.tiny_models import save_tiny_model


@pytest.mark.parametrize("fault", [*FAULTS, *ADAPTER_FAULTS])
def test_a_fault_is_found_at_the_first_probe_after_it_and_named(fault: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    found = asyncio.run(asyncio.wait_for(arrivals(tmp_path / "model", tmp_path, fault), DEADLINE_S))
    expected = {**FAULTS, **ADAPTER_FAULTS}[fault]
    assert [each.cause[: len(expected)] for each in found] == ["", "", expected, ""]
