"""Which device each process gets, and what is refused."""

import os
import sys

import pytest

from tailrace.devices import DeviceMap, Devices
from tailrace.errors import ConfigError
from tailrace.rollout.device_map import plan_devices, shared_devices, trainer_cpus_reserved
from tailrace.rollout.placement import PlacementSettings, Shared
from tailrace.trainer.base import TrainerSettings

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
ONE, TWO = TrainerSettings(), TrainerSettings(replicas=2)


def placed(**settings: object) -> PlacementSettings:
    return PlacementSettings.model_validate(settings)


def test_without_lists_nobody_is_pinned() -> None:
    trainer = TrainerSettings(ranks=2, replicas=2)
    devices = plan_devices(placed(), trainer, num_engines=3)
    assert devices == DeviceMap((None,) * 3, (None,) * 4)
    with trainer_cpus_reserved(devices):
        pass


@linux
def test_the_devices_of_a_replica_are_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    settings = placed(kind="elastic", engines=[[0, 1], [2, 3]], trainer=[[2, 3], [0, 1]])
    trainer = TrainerSettings(ranks=2, replicas=2)
    devices = plan_devices(settings, trainer, num_engines=2, tensor_parallel_size=2)
    assert devices.engines == (Devices(cpus=(0, 1)), Devices(cpus=(2, 3)))
    assert devices.trainer == tuple(Devices(cpus=(number,)) for number in (2, 3, 0, 1))
    assert shared_devices(settings, trainer, num_engines=2) == Shared("elastic", (False, True))


@linux
def test_nobody_else_uses_the_cpus_of_the_trainer() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    first, last = min(cpus), max(cpus)
    devices = plan_devices(placed(engines=[[first]], trainer=[[last]]), ONE, num_engines=1)
    assert devices == DeviceMap((Devices(cpus=(first,)),), (Devices(cpus=(last,)),))
    with trainer_cpus_reserved(devices):
        assert os.sched_getaffinity(0) == cpus - {last}
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engines": [[0]]}, r"placement.engines = .*lists devices of 1, for 2 engines"),
        ({"engines": [[0, 1], []]}, r"number 1 of the engines has 0 devices for 2 ranks"),
        ({"engines": [[0, 1], [2]]}, r"number 1 of the engines has 1 devices for 2 ranks"),
        ({"engines": [[0, 1], [1, 2]]}, r"a device is listed twice"),
        ({"trainer": [[0], [1], [2]]}, r"placement.trainer = .*for 2 replicas of the trainer"),
        ({"engines": [[0, 1], [2, 3]], "trainer": [[3], [4]]}, r"the engines have the devices \[3\], too"),
        ({"trainer": [[98_765], [98_766]]}, r"there is no \[98765, 98766\]; this process may use \d+ cpus"),
        (
            {"devices": "gpus", "trainer": [[98], [99]]},
            r"there is no \[98, 99\]; this process may use \d+ gpus",
        ),
    ],
)
def test_lists_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_devices(placed(**settings), TWO, num_engines=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "trainer", "num_engines", "message"),
    [
        ({}, ONE, 2, r"trainer.replicas = 1: .* set it to 2"),
        ({}, TWO, 1, r"1 engine cannot give a half .* at least 2"),
        ({"engines": [[0], [1]], "trainer": [[2], [3]]}, TWO, 2, r"none of the 2 engines has a device"),
        ({"engines": [[0], [1]], "trainer": [[0, 1], [2]]}, TWO, 2, r"each of the 2 engines has a device"),
    ],
)  # fmt: skip
def test_an_elastic_placement_without_a_half_is_refused(
    settings: dict[str, object], trainer: TrainerSettings, num_engines: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shared_devices(placed(kind="elastic", **settings), trainer, num_engines=num_engines)
