"""Which device each process gets, and what is refused."""

import os
import sys

import pytest

from tailrace.config import RunConfig
from tailrace.devices import DeviceMap, Devices
from tailrace.drivers.assembly.machine import Machine, check_devices
from tailrace.drivers.assembly.placement import device_map, device_sharing, trainer_cpus_reserved
from tailrace.errors import ConfigError
from tailrace.rollout.placement import DeviceSharing

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")


def placed(
    num_engines: int, replicas: int = 1, ranks: int = 1, size: int = 1, **settings: object
) -> RunConfig:
    engine = {"kind": "vllm", "tensor_parallel_size": size} if size > 1 else {}
    return RunConfig.model_validate(
        {
            "run": {"rounds": 1, "group_size": 2},
            "schedule": {"name": "serial"},
            "engine": {"replicas": num_engines, **engine},
            "trainer": {"replicas": replicas, "ranks": ranks},
            "placement": settings,
        }
    )


def test_without_lists_nobody_is_pinned() -> None:
    devices = device_map(placed(3, replicas=2, ranks=2))
    assert devices == DeviceMap((None,) * 3, (None,) * 4)
    with trainer_cpus_reserved(devices):
        pass


@linux
def test_the_devices_of_a_replica_are_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    lists = {"engines": [[0, 1], [2, 3]], "trainer": [[2, 3], [0, 1]]}
    config = placed(2, replicas=2, ranks=2, size=2, kind="elastic", **lists)
    devices = device_map(config)
    assert devices.engines == (Devices(cpus=(0, 1)), Devices(cpus=(2, 3)))
    assert devices.trainer == tuple(Devices(cpus=(number,)) for number in (2, 3, 0, 1))
    assert device_sharing(config) == DeviceSharing("elastic", (False, True))


@linux
def test_nobody_else_uses_the_cpus_of_the_trainer() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    first, last = min(cpus), max(cpus)
    devices = device_map(placed(1, engines=[[first]], trainer=[[last]]))
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
    ],
)
def test_lists_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device_map(placed(2, replicas=2, size=2, **settings))


@linux
@pytest.mark.parametrize(
    ("settings", "has"),
    [
        ({"trainer": [[98_765], [98_766]]}, r"no \[98765, 98766\]; this machine has \d+ cpus"),
        ({"devices": "gpus", "trainer": [[3], [4]]}, r"no \[4\]; this machine has 4 gpus"),
    ],
)
def test_lists_of_devices_that_the_machine_lacks_are_refused(settings: dict[str, object], has: str) -> None:
    with pytest.raises(ConfigError, match=f"placement.trainer = .*: there is {has}"):
        check_devices(placed(2, replicas=2, **settings), Machine(2, 0, gpus=4))


def test_the_first_half_of_the_replicas_trains_on_the_devices_that_are_lent() -> None:
    lists = {"engines": [[0, 1], [2, 3]], "trainer": [[2], [3], [0], [1]]}
    config = placed(2, replicas=4, size=2, kind="elastic", **lists)
    assert device_sharing(config) == DeviceSharing("elastic", (False, True), early_replicas=2)


@pytest.mark.parametrize(
    ("settings", "replicas", "num_engines", "message"),
    [
        ({}, 1, 2, r"trainer.replicas = 1: .* set it to 2"),
        ({}, 3, 2, r"trainer.replicas = 3: .* set it to 4"),
        ({}, 2, 1, r"1 engine cannot give a half .* at least 2"),
        ({"engines": [[0], [1]], "trainer": [[2], [3]]}, 2, 2, r"none of the 2 engines has a device"),
        ({"engines": [[0], [1]], "trainer": [[0, 1], [2]]}, 2, 2, r"each of the 2 engines has a device"),
    ],
)  # fmt: skip
def test_an_elastic_placement_without_a_half_is_refused(
    settings: dict[str, object], replicas: int, num_engines: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        device_sharing(placed(num_engines, replicas, kind="elastic", **settings))
