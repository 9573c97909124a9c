"""The config that `tailrace plan` writes runs on the cluster that it was made for, and says no more than it
must."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers.page_runs import save_model
from tailrace.cli import main
from tailrace.config import RunConfig, config_of, load_config
from tailrace.drivers.assembly.schedule import resolve
from tailrace.extras.plan.candidates import Candidate, Work
from tailrace.extras.plan.command import problem_of, with_candidate
from tailrace.extras.plan.planned import changes_of, on_cluster
from tailrace.rollout.placement import Kind
from tailrace.sim.cluster import rates

CLUSTER = """
[run]
rounds = 2
group_size = 2

[schedule]
name = "serial"
groups_per_round = 4
groups_per_step = 4

[model]
path = "model"

[data]
kind = "rows"
path = "rows.jsonl"

[reward]
function = "exact_match"

[sampling]
max_completion_tokens = 64

[plan]
steps = 16
max_lag = 1

[sim.cluster]
devices = 4

[sim.engines]
slots = 32
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A model, rows, and a config for four H100 that says nothing of engines and trainer."""
    save_model(tmp_path / "model", ["What is 1 + 2? 3"])
    rows = [f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}' for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def planned(cluster: Path, kind: Kind, rollout: int | None, size: int, **overrides: str) -> RunConfig:
    schedule, parameters = ("serial", {"groups_per_round": 4, "groups_per_step": 4})
    config = load_config(cluster, {key.replace("__", "."): value for key, value in overrides.items()})
    candidate = Candidate(Work(schedule, parameters), kind, rollout, size)
    made = config_of(with_candidate(config, candidate))
    resolve(made)
    return made


def test_a_planned_run_passes_a_dry_run_on_a_machine_without_the_cluster(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    output = cluster.parent / "planned.toml"
    assert main(["plan", str(cluster), "--output", str(output)]) == 0
    capsys.readouterr()
    written = tomllib.loads(output.read_text())
    assert written["engine"]["kind"] == "vllm" and written["engine"]["dtype"] == "bfloat16"
    assert written["trainer"]["device"] == "cuda" and written["placement"]["devices"] == "gpus"
    used = {gpu for lists in ("engines", "trainer") for one in written["placement"][lists] for gpu in one}
    assert used == {0, 1, 2, 3}
    assert "threads" not in written["trainer"] and "record" not in written
    words = ["train", str(output), "--output-dir", str(cluster.parent / "run"), "--dry-run"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "devices and memory are judged on a node of [sim.cluster] (H100), not on this machine" in err
    assert "the memory of cuda, at most: " in out and " of 74.5 GiB" in out
    assert main([*words, "--sim.cluster.devices", "2"]) == 2
    refused = capsys.readouterr().err
    assert "a node of [sim.cluster] (H100) has 2 gpus for this process: [0, 1]" in refused
    assert main([*words, "--sim.cluster.device", "CPU"]) == 2
    assert "torch finds no CUDA device on a node of [sim.cluster] (CPU)" in capsys.readouterr().err
    assert main(words[:-1]) == 2, "the run itself needs the devices"
    assert "name the interpreter of an environment with vLLM" in capsys.readouterr().err


def test_on_devices_of_their_own_engines_come_first(cluster: Path) -> None:
    made = planned(cluster, "disaggregated", 2, 2)
    assert made.placement.engines == ((0, 1),) and made.placement.trainer == ((2, 3),)
    assert (made.engine.num_engines, made.engine.num_devices, made.engine.max_num_seqs) == (1, 2, 32)
    assert (made.trainer.ranks, made.trainer.replicas, made.trainer.dtype) == (2, 1, "bfloat16")


def test_in_turn_all_devices_train_and_servers_can_sleep(cluster: Path) -> None:
    made = planned(cluster, "colocated", None, 1)
    assert made.placement.engines == ((0,), (1,), (2,), (3,))
    assert made.placement.trainer == ((0, 1, 2, 3),)
    assert getattr(made.engine, "args", ()) == ("--enable-sleep-mode",)


def test_the_replica_that_trains_early_has_the_devices_of_the_last_engines(cluster: Path) -> None:
    made = planned(cluster, "elastic", None, 1)
    assert made.placement.trainer == ((2, 3), (0, 1))
    assert (made.trainer.ranks, made.trainer.replicas) == (2, 2)


def test_processes_that_divide_layers_share_the_devices_of_a_replica(cluster: Path) -> None:
    made = planned(cluster, "colocated", None, 1, trainer__tensor_parallel="2")
    assert (made.trainer.ranks, made.trainer.tensor_parallel) == (2, 2)
    assert made.placement.trainer == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("model", "num", "longest", "given", "found"),
    [
        ("Qwen2.5-7B", 4, 16_384, {}, 1),
        ("Qwen2.5-7B", 4, 32_000, {}, 2),
        ("Qwen2.5-7B", 4, 32_000, {"trainer": {"tensor_parallel": 1}}, 1),
        ("Qwen2.5-7B", 4, 32_000, {"trainer": {"lora": {}}}, 1),
        ("Qwen3-30B-A3B", 16, 16_384, {}, 1),
        ("Qwen3-30B-A3B", 16, 32_000, {}, 2),
    ],
)
def test_layers_are_divided_where_shards_alone_do_not_fit(
    model: str, num: int, longest: int, given: dict[str, Any], found: int
) -> None:
    """Of so many H100 each has 30.5 GB of state, and what a pass over the longest sample takes."""
    devices = {"device": "H100", "devices": 2 * num, "model": model, "rollout_devices": num}
    sections = {key: value for key, value in tomllib.loads(CLUSTER).items() if key in ("run", "schedule")}
    sections["sim"] = {"cluster": devices, "lengths": {"max_tokens": longest}}
    config, same = (config_of(sections | each) for each in (given, {"trainer": {"tensor_parallel": found}}))
    assert config.sim.cluster
    made = on_cluster(config, config.sim.cluster, "disaggregated")["trainer"]
    assert (made["ranks"], made.get("tensor_parallel", 1)) == (num // found, found)
    candidate = Candidate(Work("serial", {}), "disaggregated", num, 1)
    predicted, written = (problem_of(each).sim_of(candidate).trainer for each in (config, same))
    assert predicted == written
    assert (predicted.tokens_per_s < rates(config.sim).trainer.tokens_per_s) == (found > 1)


def test_engines_that_the_config_names_stay_and_have_a_size_that_they_can_have(cluster: Path) -> None:
    made = planned(cluster, "disaggregated", 2, 1, engine__kind="native")
    assert (made.engine.kind, made.engine.torch_device, made.engine.num_engines) == ("native", "cuda", 2)
    sims, _ = problem_of(load_config(cluster, {"engine.kind": "native"})).candidates()
    assert {candidate.tensor_parallel for candidate in sims} == {1}
    sims, _ = problem_of(load_config(cluster)).candidates()
    assert {candidate.tensor_parallel for candidate in sims} == {1, 2, 4}


def test_several_nodes_are_those_of_ray(cluster: Path) -> None:
    made = planned(cluster, "disaggregated", 2, 1, sim__cluster__devices_per_node="2")
    assert (made.host.kind, made.weights.transport) == ("ray", "process_group")
    assert made.placement.engines == made.placement.trainer == ()


def test_a_type_that_the_config_names_stays(cluster: Path) -> None:
    made = planned(cluster, "disaggregated", 2, 1, trainer__dtype="float32")
    assert (made.trainer.dtype, made.engine.dtype) == ("float32", "bfloat16")


def test_only_changes_are_written_and_they_make_the_same_config(cluster: Path) -> None:
    """Kinds are written, though each is the default of its own section."""
    overrides = {"engine.kind": "vllm", "run.seed": "0", "weights.transport": "filesystem"}
    config = load_config(cluster, overrides)
    changes = changes_of(config)
    assert changes["engine"] == {"kind": "vllm"} and changes["weights"] == {"transport": "filesystem"}
    assert changes["sim"] == {"cluster": {"devices": 4}, "engines": {"slots": 32}}
    assert "seed" not in changes["run"] and "sft" not in changes
    assert config_of(changes) == config
