"""Each fault in the way of weights is found by the first probe after it and named, by an embedded engine in
its process; and what a prover makes of answers."""

import asyncio
from pathlib import Path

import pytest

from helpers.faults import ADAPTER_FAULTS, FAULTS, MEMORY, arrivals
from helpers.processes import DEADLINE_S
from helpers.tiny_models import save_tiny_model


@pytest.mark.parametrize("fault", [*FAULTS, *ADAPTER_FAULTS])
def test_a_fault_is_found_at_the_first_probe_after_it_and_named(fault: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    found = asyncio.run(asyncio.wait_for(arrivals(tmp_path / "model", tmp_path, fault), DEADLINE_S))
    expected = {**FAULTS, **ADAPTER_FAULTS}[fault]
    assert [each.cause[: len(expected)] for each in found] == ["", "", expected, ""]
    assert [each.gpu for each in found] == [{}] * 4  # a CPU has no such figures


def test_an_answer_to_a_probe_carries_the_figures_of_the_engine_s_device(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    found = asyncio.run(asyncio.wait_for(arrivals(tmp_path / "model", tmp_path, MEMORY), DEADLINE_S))
    assert [each.gpu for each in found] == [{"perf/max_memory_allocated_gb": n} for n in (1.0, 2.0, 3.0, 4.0)]
