"""`tailrace simulate`: files, figures and the set-up that is taken from the run's config."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.cli import main
from tailrace.config import RunConfig, config_of
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.simulation import sim_settings, sources
from tailrace.drivers.commands import simulate
from tailrace.record.figures import TRIAL_FIGURES
from tailrace.record.timeline import RunTimelines
from tailrace.schedules import SCHEDULES

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN = {"run": {"rounds": 2, "group_size": 4}, "schedule": {"name": "serial"}}


def test_replicas_slots_and_length_limit_are_taken_from_the_run() -> None:
    engine = {"replicas": 3}
    config = RunConfig.model_validate(RUN | {"engine": engine, "sampling": {"max_completion_tokens": 4096}})
    sim = sim_settings(config)
    assert (sim.engines.count, sim.engines.slots) == (3, config.engine.max_num_seqs)
    assert (sim.lengths.max_tokens, sim.lengths.median_tokens) == (4096, 1230 / 4)


def test_a_value_in_the_sim_section_wins() -> None:
    sections = {"engine": {"replicas": 3}, "sampling": {"max_completion_tokens": 4096}}
    sim = {"engines": {"count": 5, "slots": 7}, "lengths": {"max_tokens": 100}}
    filled = sim_settings(RunConfig.model_validate(RUN | sections | {"sim": sim}))
    assert (filled.engines.count, filled.engines.slots) == (5, 7)
    assert (filled.lengths.max_tokens, filled.lengths.median_tokens) == (100, 1230)


def test_without_sampling_the_limit_is_the_simulator_s_own() -> None:
    filled = sim_settings(RunConfig.model_validate(RUN))
    assert (filled.engines.count, filled.lengths.max_tokens) == (1, 16_384)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_cluster_runs_every_schedule(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round, with an eighth of the engines and of the samples: a round of the file takes seconds."""
    words = [
        "simulate",
        str(EXAMPLES / "cluster.toml"),
        "--schedule.name",
        name,
        "--output-dir",
        str(tmp_path),
    ]
    small = ["--run.rounds", "1", "--run.group_size", "2", "--sim.engines.count", "8"]
    assert main([*words, *small, "--all"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "reward" in row]
    assert steps == list(range(1, len(steps) + 1)) and steps
    timelines = RunTimelines(tmp_path / "events.jsonl")
    timelines.update()
    (timeline,) = timelines.all
    assert timeline.is_closed and len(timeline.steps) == len(steps) and timeline.requests
    assert json.loads((tmp_path / "summary.json").read_text())["groups"]["trained"] >= 32
    out = capsys.readouterr().out
    for figure in ("staleness, max (publications)", "lag, mean (optimizer steps)", "carried tokens"):
        assert figure in out
    for figure in ("carried samples", "length, mean", "length, max", "truncated samples", "samples/s"):
        assert figure in out


def test_five_figures_are_printed_and_the_others_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--run.rounds", "2", "--run.group_size", "2"]
    tables = {}
    for more in ((), ("--all",)):
        assert main([*words, *more]) == 0
        cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
        tables[more] = {label.strip(): value.strip() for _, label, value, _ in cells}
    few, every = tables.values()
    assert [*few] == [
        "whole run",
        "samples/s",
        "waiting ratio",
        "lag, mean (optimizer steps)",
        "wasted tokens",
    ]
    assert few.items() < every.items() and "reward" not in every
    labels = {figure.printed[0] for figure in TRIAL_FIGURES.values()} - {""}
    assert {"main time a round", "bound of its own rounds", "effective sample size"} < labels & every.keys()
    own = [f"{key}, median of rounds" for key in ("wait_s", "start_ratio", "publish_s")]
    own += ["generated_tokens_per_s, median of rounds", "tokens trained", "tokens masked"]
    assert [*every] == [*few, *(label for label in every if label in labels and label not in few), *own]


def test_a_simulation_has_the_trackers_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'tailrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--output-dir", str(tmp_path)]
    assert main([*words, "--record.trackers", '["tensorboard"]']) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {key for row in rows for key in row} - {"step", "wall_time"}
    steps = [(row["step"], row["wall_time"]) for row in rows if "reward" in row]
    # The wall time of a simulation is its virtual time.
    assert [(each.step, each.wall_time) for each in found.Scalars("reward")] == steps


def test_a_simulation_does_not_replace_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that has only begun."""
    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--output-dir", str(tmp_path)]
    with RunFolder(tmp_path).locked():
        assert main(words) == 2
    assert "it holds a run of tailrace train; choose another" in capsys.readouterr().err


RECORDED = "{ kind = 'recorded', path = 'runs/one/samples' }"


@pytest.mark.parametrize(
    ("overrides", "like", "said"),
    [
        (
            {},
            None,
            "Lengths are a default distribution of no model, costs are defaults of no machine; --like RUN "
            "takes those of a run, [sim.cluster] costs of devices.",
        ),
        (
            {"sim.lengths.median_tokens": "30.0", "sim.engines.base_s": "0.02"},
            None,
            "Lengths are those of [sim.lengths], costs are those of [sim].",
        ),
        (
            {"sim.lengths.distribution": RECORDED, "sim.engines.base_s": "0.02"},
            "runs/one",
            "Lengths are recorded in runs/one/samples, costs are fitted to runs/one.",
        ),
        (
            {"sim.lengths.distribution": RECORDED, "sim.cluster.model": "Qwen3-1.7B"},
            None,
            "Lengths are recorded in runs/one/samples, costs are computed for Qwen3-1.7B on 8 x H100.",
        ),
        (
            {"sim.lengths.median_tokens": "30.0", "sim.engines.base_s": "0.02"},
            "runs/default",
            "Lengths are those of [sim.lengths], costs are fitted to runs/default.",
        ),
    ],
)
def test_a_sentence_says_where_lengths_and_costs_come_from(
    overrides: dict[str, str], like: str | None, said: str
) -> None:
    assert sources(config_of(dict(RUN), overrides), like) == said


def test_in_80_columns_no_line_is_longer_and_in_a_pipe_each_row_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--run.rounds", "1", "--run.group_size", "2"]
    assert main(words) == 0
    piped = capsys.readouterr().out.splitlines()
    file = io.StringIO()
    narrow = Console(
        file=file, width=80, force_terminal=True, color_system=None, soft_wrap=True, markup=False
    )
    monkeypatch.setattr(simulate, "open_console", lambda: narrow)
    assert main(words) == 0
    shown = file.getvalue().splitlines()
    assert max(map(len, shown)) <= 80
    (setup,) = (line for line in piped if line.startswith("virtual time: "))
    assert "at most. Lengths are " in setup and setup.endswith(".")
    (bound,) = (line for line in piped if line.startswith("bound "))
    words_shown = " ".join(" ".join(map(str.strip, shown)).split())
    assert setup in words_shown and " ".join(bound.split()) in words_shown
