"""Which CPU each worker may use."""

import os
import sys

import pytest

from tailrace.errors import ConfigError
from tailrace.workers.base import HostSettings, plan_pins, trainer_cpu_reserved

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")


def test_nothing_is_pinned_unless_asked() -> None:
    assert plan_pins(HostSettings(), 1) == []
    with trainer_cpu_reserved([]):
        pass


@linux
def test_the_trainer_gets_a_cpu_that_nobody_else_uses() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    pins = plan_pins(HostSettings(pin=True), 1)
    assert len(set(pins)) == 2
    with trainer_cpu_reserved(pins):
        assert os.sched_getaffinity(0) == cpus - {pins[1]}
    assert os.sched_getaffinity(0) == cpus


def test_more_workers_than_cpus_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"host\.pin = True: 100000 engines and a trainer need as many CPUs"
    ):
        plan_pins(HostSettings(pin=True), 100_000)
