"""Logs of other frameworks (fixtures/README.md): their figures, what is fitted to them, what is refused."""

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import main
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.errors import ConfigError
from tailrace.extras.plan.fit_command import fitted_run
from tailrace.extras.plan.logs import EXTRAS
from tailrace.extras.plan.peer_fit import fit_peer
from tailrace.extras.plan.peers import PeerLog, read_peer
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules.serial import serial
from tailrace.sim.settings import SimSettings

LOGS = Path(__file__).with_name("fixtures")
DUMPED = [600, 400, 300, 250, 200, 150, 130, 120, 110, 100, 100, 100, 90, 90, 80, 60]
"""As in fixtures/make_peers.py, and so are the figures below."""
SECOND = {"step_s": 20.43, "generation_s": 13.44, "update_s": 5.24, "sync_s": 0.5, "samples": 16}
SECOND |= {"mean_tokens": 180, "max_tokens": 600}
EXTRA: dict[str, dict[str, float]] = {
    "verl": {"reward_s": 0.25, "prompt_tokens": 100, "sequence_tokens": 4480, "devices": 8, "clipped": 0},
    "prime-rl": {
        "step_s": 13.84,
        "wait_s": 8,
        "prompt_tokens": 100,
        "devices": 4,
        "lag_mean": 1.5,
        "lag_max": 2,
        "p90_tokens": 400,
    },
    "slime": {"wait_s": 15.19, "generation_s": 13.69, "clipped": 0, "prompt_tokens": 1, "median_tokens": 105},
    "nemo-rl": {"reward_s": 0.25, "prompt_tokens": 100, "sequence_tokens": 4480, "devices": 8, "clipped": 0},
}
"""What differs from SECOND, by the folder."""
Row = dict[str, Any]


def rows_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def written(folder: Path, rows: list[Row]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_rows(**changed: float | None) -> list[Row]:
    """The rows of the fixture with other figures; None: without them."""
    changes = {name.replace("__", "/"): value for name, value in changed.items()}
    rows = rows_of(LOGS / "verl" / "experiment.jsonl")
    datas = [row["data"] | changes for row in rows]
    kept = [{name: value for name, value in data.items() if value is not None} for data in datas]
    return [{"step": number, "data": data} for number, data in enumerate(kept, 1)]


def predicted_s(sim: SimSettings, groups: int, size: int) -> float:
    """Seconds of a step of `serial` with fitted costs."""
    schedule = partial(serial, groups_per_round=groups, groups_per_step=groups)
    figures = simulate(
        schedule, sim, RunSettings(rounds=40, group_size=size), sharing=DeviceSharing("colocated")
    ).figures
    return groups * size / figures["samples_per_s"]


@pytest.mark.parametrize("name", EXTRA)
def test_the_figures_of_a_step_are_read_exactly(name: str) -> None:
    expected = SECOND | EXTRA[name]
    if name == "prime-rl":
        del expected["generation_s"]
    log = read_peer(LOGS / name)
    assert log.steps[0] == pytest.approx(expected, rel=1e-6)
    assert len(log.steps) == 4


@pytest.mark.parametrize("name", EXTRA)
def test_the_lengths_of_dumped_responses_are_read_exactly_and_by_group(name: str) -> None:
    assert [sorted(each) for each in read_peer(LOGS / name).groups] == [
        sorted(DUMPED[number::4]) for number in range(4)
    ]


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_the_costs_with_which_a_log_was_made_are_fitted(name: str) -> None:
    sim = fitted_run(LOGS / name).sim
    assert (sim.engines.base_s, sim.engines.slope_s) == pytest.approx((0.02, 0.0005), rel=1e-4)
    assert (sim.engines.count, sim.engines.slots, sim.engines.load_s) == (1, 16, 0.5)
    assert (sim.trainer.tokens_per_s, sim.trainer.step_s) == pytest.approx((2000, 3 + 1), rel=1e-4)
    assert (sim.rewards.median_s, sim.rewards.workers, sim.rewards.sigma) == (0.25, 16, 0)
    assert (sim.lengths.max_tokens, sim.lengths.prompt_tokens) == (700, 100)


def test_a_trainer_that_waits_for_samples_has_engines_that_generate_all_the_time() -> None:
    """(13.84 - 0.5) s for 180 tokens of each of 16 samples at once."""
    log = read_peer(LOGS / "prime-rl")
    assert log.overlaps
    assert fit_peer(log).sim.engines.base_s == pytest.approx(13.34 / 180)
    assert log.waits == (
        "a step takes 13.8 s: waiting for samples 58%, training 38%, new weights 4%, other work 1%; the "
        "longest response has 3.4x the mean; generation sets the pace; its tokens are up to 2 steps "
        "old; they are 1.5 steps old on average"
    )


def test_the_asynchronous_trainers_of_verl_and_nemo_rl_log_waits(tmp_path: Path) -> None:
    rows = verl_rows(fully_async__count__current_param_version=3, fully_async__partial__max_partial_span=4)
    log = read_peer(written(tmp_path, rows))
    assert log.overlaps and log.mean("wait_s") == pytest.approx(13.69) and log.mean("lag_max") == 4
    timing = {"total_step_time": 10, "exposed_generation": 0.1, "policy_training": 9, "weight_sync": 0.5}
    train = {"gen_tokens_per_sample/max": 90, "mean_gen_tokens_per_sample": 30, "mean_prompt_length": 10}
    train |= {"total_num_tokens": 320, "avg_trajectory_age": 1.5}
    row = {f"timing/train/{key}": value for key, value in timing.items()}
    row |= {f"train/{key}": value for key, value in train.items()}
    log = read_peer(written(tmp_path, [{"_step": 1} | row, {"_step": 2} | row]))
    assert log.overlaps and log.mean("samples") == 8
    assert "training sets the pace; they are 1.5 steps old on average" in log.waits


def test_trl_logs_the_same_to_its_state_and_to_wandb_and_there_its_parts_too() -> None:
    state, wandb = (
        read_peer(LOGS / "trl" / name, samples=8) for name in ("trainer_state.json", "run-offline.wandb")
    )
    names = ("step_s", "mean_tokens", "max_tokens", "clipped", "sequence_tokens", "prompt_tokens")
    assert len(state.steps) == len(wandb.steps) == 15
    for one, other in zip(state.steps, wandb.steps, strict=True):
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert state.steps[0]["step_s"] == rows_of_state()[1]["step_time"]
    assert (
        state.steps[0]["sequence_tokens"]
        == rows_of_state()[1]["num_tokens"] - rows_of_state()[0]["num_tokens"]
    )
    assert not state.has("generation_s")
    assert 0.45 < wandb.mean("generation_s") / wandb.mean("step_s") < 0.6
    parts = sum(wandb.mean(name) for name in ("generation_s", "update_s", "reward_s"))
    assert parts == pytest.approx(wandb.mean("step_s"))


def rows_of_state() -> list[Row]:
    found: list[Row] = json.loads((LOGS / "trl" / "trainer_state.json").read_text())["log_history"]
    return found


def test_the_completions_of_trl_say_how_many_samples_a_step_has() -> None:
    log = read_peer(LOGS / "trl")
    assert log.mean("samples") == 8
    assert [len(group) for group in log.groups] == [4] * 6


@pytest.mark.parametrize("name", ["", "trainer_state.json", "run-offline.wandb"])
def test_the_step_of_a_trl_run_is_predicted_within_a_tenth(name: str) -> None:
    """Fitted to steps 2 to 8, predicted for steps 9 to 16."""
    log = read_peer(LOGS / "trl" / name, samples=8)

    def part(steps: slice) -> PeerLog:
        return replace(log, steps=log.steps[steps])

    predicted = predicted_s(fit_peer(part(slice(7))).sim, groups=2, size=4)
    assert predicted == pytest.approx(part(slice(7, None)).mean("step_s"), rel=0.1)
    assert predicted_s(fit_peer(log).sim, groups=2, size=4) == pytest.approx(log.mean("step_s"), rel=0.1)


def test_lengths_without_a_dump_have_the_mean_and_the_longest_response_of_the_log(tmp_path: Path) -> None:
    found = fitted_run(written(tmp_path, verl_rows())).sim.lengths
    assert found.distribution is None and found.median_tokens
    assert found.median_tokens < 180
    sim = SimSettings(lengths=found.model_copy(update={"correlation": 0.0}))
    schedule = partial(serial, groups_per_round=4, groups_per_step=4)
    figures = simulate(schedule, sim, RunSettings(rounds=200, group_size=4)).figures
    assert figures["length_mean"] == pytest.approx(180, rel=0.05)


@pytest.mark.parametrize("median", [60, 150])
def test_a_logged_quantile_decides_how_wide_the_lengths_are(tmp_path: Path, median: int) -> None:
    row = {"perf/step_time": 10, "perf/rollout_time": 6, "perf/train_wait_time": 7, "perf/train_time": 3}
    row |= {"rollout/response_len/mean": 180, "rollout/response_len/max": 5000}
    rows = [{"rollout/step": n, "rollout/response_len/median": median} | row for n in range(3)]
    found = fit_peer(read_peer(written(tmp_path, rows), samples=64)).sim.lengths
    assert found.median_tokens == pytest.approx(median, rel=0.1)


def test_the_command_prints_where_each_figure_is_from_and_what_is_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", str(LOGS / "verl")]) == 0
    out = capsys.readouterr().out
    assert "note: log: generation_s is 13.69, from timing_s/gen\n" in out
    assert "note: log: sync_s is 0.5, from timing_s/update_weights\n" in out
    assert "assumed: rewards that timing_s/reward does not show are part of timing_s/gen" in out
    assert "assumed: a token has 4 characters" in out
    assert "1 s a step are in no part" in out
    assert "it waits most for generation" in out


def test_a_simulation_takes_the_fitted_section(tmp_path: Path) -> None:
    config, fitted = tmp_path / "config.toml", tmp_path / "fitted.toml"
    schedule = '[schedule]\nname = "serial"\ngroups_per_round = 4\ngroups_per_step = 4\n'
    config.write_text(f"[run]\nrounds = 4\ngroup_size = 4\n{schedule}")
    assert main(["fit", str(LOGS / "verl"), "--output", str(fitted)]) == 0
    both = tmp_path / "both.toml"
    both.write_text(config.read_text() + fitted.read_text())
    words = ([str(config), "--like", str(LOGS / "verl")], [str(both)])
    for number, each in enumerate(words):
        assert main(["simulate", *each, "--json", str(tmp_path / f"{number}.json")]) == 0
    one, other = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert one == other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"response_length__max": None}, "the log of verl has no response_length/max, which is max_tokens"),
        ({"timing_s__gen": None}, "the log of verl has no timing_s/gen, which is generation_s or wait_s"),
        ({"timing_s__update_actor": None}, "has no timing_s/update_actor .*, which is update_s"),
        ({"timing_s__step": None}, "no log with the time of steps; .*verl: timing_s/step"),
        ({"timing_s__gen": 13_690.0}, r"take 1.37e\+04 s, and a step \(timing_s/step\) takes .* are mixed"),
        ({"response_length__mean": 9000.0}, "response_length/mean is 9000, and response_length/max is 600"),
        ({"perf__total_num_tokens": None}, "how many samples a step has; give them: --samples N"),
        ({"step_time": 3.0}, "it has logs of TRL and verl"),
    ],
)
def test_a_log_without_a_figure_or_with_an_impossible_one_is_refused(
    tmp_path: Path, changed: dict[str, float | None], message: str
) -> None:
    path = written(tmp_path, verl_rows(**changed))
    with pytest.raises(ConfigError, match=message) as refused:
        read_peer(path)
    assert str(path) in str(refused.value)


def test_figures_that_no_step_has_together_are_named(tmp_path: Path) -> None:
    one, other = verl_rows(response_length__mean=None)[:2], verl_rows(timing_s__gen=None)[2:]
    with pytest.raises(
        ConfigError, match=r"has no response_length/mean or .* or timing_s/gen, which is mean_"
    ):
        read_peer(written(tmp_path, one + other))


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        read_peer(tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"there is no run in it.*name one with figures of .*TRL: step_time"
    ):
        read_peer(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verl/experiment.jsonl", "line 1: "),
        ("verl/rollouts/2.jsonl", "line 1: "),
        ("trl/run-offline.wandb", "DecodeError"),
        ("slime/rollout_data/1.pt", "damaged or of another version"),
        ("trl/trainer_state.json", "damaged or of another version"),
        ("trl/completions/completions_00009.parquet", "damaged or of another version"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    shutil.copytree(LOGS / Path(name).parts[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / Path(*Path(name).parts[1:])
    content = file.read_bytes()
    file.write_bytes(content[:20] + b"\xff" * 20 + content[40:])
    with pytest.raises(ConfigError, match=message) as refused:
        read_peer(tmp_path)
    assert str(file) in str(refused.value)


def test_the_offline_file_of_a_killed_run_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    file = tmp_path / "run.wandb"
    content = (LOGS / "trl" / "run-offline.wandb").read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert 5 < len(read_peer(file, samples=8).steps) < 10


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("wandb.proto.wandb_internal_pb2", "trl/run-offline.wandb"),
        ("tensorboard.util.tensor_util", "slime/tensorboard"),
        ("pyarrow", "trl"),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(f"needs the package {module}; {EXTRAS}")):
        read_peer(LOGS / name, samples=8)
