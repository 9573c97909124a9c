"""What a run asks of a cluster, and what it refuses before it looks for one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings, TrainerSettings
from tailrace.drivers.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.weights.settings import (
    FilesystemSettings,
    ProcessGroupSettings,
    SharedMemorySettings,
    WeightsSettings,
)
from tailrace.drivers.workers.base import AnyHostSettings, LocalHostSettings
from tailrace.drivers.workers.engine import EngineJob
from tailrace.drivers.workers.hosts import check_host, host_kind
from tailrace.drivers.workers.trainer import TrainerJob, process_names, trainer_jobs
from tailrace.errors import ConfigError
from tailrace.extras.cluster.settings import RayHostSettings, RoleResources
from tailrace.extras.http.server import ServerJob
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.importing import install

pytest.importorskip("ray")
from tailrace.extras.cluster.ray import Bundles, plan_bundles

RAY, STREAM = RayHostSettings(), ProcessGroupSettings()


def test_each_worker_of_a_run_is_a_bundle_of_its_role() -> None:
    resources = RoleResources(engine={"GPU": 1, "fast": 0.5}, reward={"CPU": 0.1})
    found = plan_bundles(
        RayHostSettings(resources=resources),
        engine=NativeEngineSettings(replicas=2),
        trainer=TrainerSettings(threads=4, device="cuda", ranks=2, replicas=2),
        reward=RewardSettings(workers=1),
        needs_reference=True,
    )
    of_trainer = {"CPU": 4.0, "GPU": 1.0}
    assert found == [
        Bundles("trainer", ["trainer-0-0", "trainer-0-1", "trainer-1-0", "trainer-1-1"], of_trainer),
        Bundles("reference", ["reference"], of_trainer),
        Bundles("engine", ["engine-0", "engine-1"], {"GPU": 1, "fast": 0.5}),
        Bundles("reward", ["scorer-0"], {"CPU": 0.1}),
    ]


def test_nothing_is_reserved_for_the_reference_that_a_trainer_with_an_adapter_is_itself() -> None:
    found = plan_bundles(
        RAY,
        engine=NativeEngineSettings(),
        trainer=TrainerSettings(lora=LoraSettings()),
        reward=RewardSettings(workers=1),
        needs_reference=True,
    )
    assert [bundles.role for bundles in found] == ["trainer", "engine", "reward"]


def test_each_process_of_the_trainer_has_its_name_and_its_place() -> None:
    settings = TrainerSettings(ranks=2, replicas=2)
    jobs = trainer_jobs(job(STREAM).model_copy(update={"trainer": settings}))
    assert [name for name, _ in jobs] == process_names(settings)
    assert [(each.replica, each.rank) for _, each in jobs] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_servers_that_somebody_else_runs_are_not_placed() -> None:
    found = plan_bundles(
        RAY,
        engine=VllmEngineSettings(urls=("http://10.0.0.7:8000",)),
        trainer=TrainerSettings(),
        reward=RewardSettings(workers=1),
        needs_reference=False,
    )
    assert [bundles.role for bundles in found] == ["trainer", "reward"]


def test_a_server_that_the_run_starts_has_a_bundle_with_the_gpus_of_its_group() -> None:
    engine = VllmEngineSettings(replicas=2, tensor_parallel_size=4)
    found = plan_bundles(
        RAY,
        engine=engine,
        trainer=TrainerSettings(),
        reward=RewardSettings(workers=1),
        needs_reference=False,
    )
    assert found[1] == Bundles("engine", ["engine-0", "engine-1"], {"CPU": 1.0, "GPU": 4.0})


def test_a_server_on_another_node_listens_on_the_address_of_its_node() -> None:
    command = ("/venv/bin/python", "-m", "server", "--host", "127.0.0.1", "--port", "4000")
    server = ServerJob(command=command, needs={"engine.python": Path("/venv/bin")})
    assert server.at("10.0.0.7").command[4:] == ("10.0.0.7", "--port", "4000")
    assert server.folders() == {"engine.python": Path("/venv/bin")}


def joining(*roles: str) -> LocalHostSettings:
    return LocalHostSettings.model_validate({"join": roles, "listen": "0.0.0.0:7777"})


VLLM = VllmEngineSettings(urls=("http://10.0.0.7:8000",))


@pytest.mark.parametrize(
    ("key", "host", "weights", "engine"),
    [
        ("weights.transport", RAY, SharedMemorySettings(), NativeEngineSettings()),
        ("weights.transport", joining("trainer"), SharedMemorySettings(), NativeEngineSettings()),
        ("weights.transport", joining("engine"), SharedMemorySettings(), NativeEngineSettings()),
        ("weights.host", joining("engine"), STREAM, NativeEngineSettings()),
        ("host.join", joining("engine"), FilesystemSettings(), VLLM),
    ],
)
def test_what_cannot_be_honoured_on_other_hosts_is_refused(
    key: str, host: AnyHostSettings, weights: WeightsSettings, engine: EngineSettings
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_host(host, weights=weights, engine=engine)
    assert refused.value.key == key


def test_what_can_be_honoured_on_other_hosts_is_taken() -> None:
    native = NativeEngineSettings()
    for host in (LocalHostSettings(), joining("reward"), joining("reference")):
        check_host(host, weights=SharedMemorySettings(), engine=native)
    for host in (RAY, joining("trainer"), joining("trainer", "engine")):
        check_host(host, weights=STREAM, engine=native)
    check_host(joining("engine"), weights=ProcessGroupSettings(host="10.0.0.7"), engine=native)


@pytest.mark.parametrize(
    "given", [{"join": ["engine"]}, {"listen": "0.0.0.0:1"}, {"join": [], "listen": "7777"}]
)
def test_an_address_without_roles_and_roles_without_an_address_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LocalHostSettings.model_validate(given)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=re.escape(f"host.kind = 'ray': Ray is not installed; {install('ray')}")
    ):
        check_host(RAY, weights=STREAM, engine=NativeEngineSettings())


def test_a_file_with_rewards_is_in_the_working_directory_of_a_worker_on_another_node() -> None:
    named = RewardSettings(function="/home/me/rewards.py:score")
    assert host_kind(RAY).rewards_there(named).function == "rewards.py:score"
    assert host_kind(LocalHostSettings()).rewards_there(named) == named
    module = RewardSettings(function="package.rewards:score")
    assert host_kind(RAY).rewards_there(module) == module


def job(weights: WeightsSettings) -> TrainerJob:
    return TrainerJob(
        model=Path("/models/one"),
        trainer=TrainerSettings(),
        algorithm=AlgorithmSettings(),
        sampling=SamplingSettings(max_completion_tokens=8),
        weights=weights,
        published_dtype="float32",
    )


def test_a_trainer_sends_weights_from_the_address_of_its_node_unless_the_config_names_one() -> None:
    at_default, named = job(ProcessGroupSettings()), job(ProcessGroupSettings(host="192.168.0.1"))
    assert at_default.at("10.0.0.7").weights == ProcessGroupSettings(host="10.0.0.7")
    assert named.at("10.0.0.7").weights == named.weights
    files = job(FilesystemSettings(folder=Path("/nfs")))
    assert files.at("10.0.0.7").weights == files.weights
    assert files.at("10.0.0.7").host == "10.0.0.7"


def test_workers_that_load_a_model_need_its_folder() -> None:
    engine = EngineJob(
        model=Path("/models/one"),
        engine=NativeEngineSettings(),
        sampling=SamplingSettings(max_completion_tokens=8),
    )
    assert engine.folders() == job(STREAM).folders() == {"model.path": Path("/models/one")}


def test_ray_is_not_imported_by_a_run_on_this_host() -> None:
    code = "import sys, tailrace.cli, tailrace.drivers.commands.train; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
