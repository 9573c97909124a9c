import json
import math
from pathlib import Path

import pytest

from helpers.record_story import (
    PIPELINED_FIGURES,
    WALL_TIME,
    Story,
    make_episode,
    make_group,
    pipelined_round,
    play,
    rows_of,
)
from tailrace.contracts.engine import Arrival
from tailrace.errors import ConfigError
from tailrace.record.events import (
    BooksClosed,
    ControllerLag,
    EngineStateChanged,
    EssTaken,
    Evaluated,
    GroupEnded,
    RoundEnded,
    RoundStarted,
    RowSkipped,
    SampleScored,
    Stepped,
    TokensWasted,
    WeightsProbed,
)
from tailrace.record.figures import family, joined, steps_of
from tailrace.record.metrics import MetricsWriter, read_row, read_rows
from tailrace.record.rewind import rewind_records
from tailrace.types import SampleId


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(story: Story, path: Path) -> list[dict[str, float]]:
    play(story.events, MetricsWriter(path))
    return lines_of(path)


def test_a_step_becomes_a_row(tmp_path: Path) -> None:
    first, _ = write(pipelined_round(), tmp_path / "metrics.jsonl")
    assert first == {
        "step": 1,
        "round": 0,
        "time": 16.0,
        "wall_time": WALL_TIME,
        "num_tokens": 14,
        "tokens/trained": 10,
        "samples/trained": 2,
        "reward": 0.5,
        "reward_std": math.sqrt(0.5),
        "frac_reward_zero_std": 0.0,
        "completions/mean_length": 5.0,
        "completions/min_length": 4,
        "completions/p50_length": 4,
        "completions/p90_length": 6,
        "completions/p99_length": 6,
        "completions/max_length": 6,
        "completions/std_length": math.sqrt(2),
        "completions/std_length_in_group": math.sqrt(2),
        "completions/clipped_ratio": 0.0,
        "loss": 0.25,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "entropy": 1.5,
        "clip_ratio/region_mean": 0.125,
        "kl": 0.0,
        "mismatch_kl": 0.01,
        "engine_mismatch_kl": 0.005,
        "ess": 1.0,
        "value_loss": 0.0,
        "skipped": 0,
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "lag/mean": 0.0,
        "lag/max": 0,
        **{f"lag/tenth/{tenth}": 0.0 for tenth in range(10)},
        "carried/tokens": 0.0,
        "carried/samples": 0.0,
        "versions/mean": 1.0,
        "versions/max": 1,
        "deferrals/mean": 0.0,
        "deferrals/max": 0,
        "age/mean": 0.0,
        "age/max": 0,
        "bias/length": 5 / 10 - 1,
        "bias/reward": 0.5 - 0.75,
        "bias/delay": 0.0,
        "time/step": 6.0,
        "time/wait": 4.0,
        "time/train": 2.0,
        "perf/tokens_per_s": 10 / 6,
        "tokens/generated": 10,
        "groups/trained": 1,
    }


def test_a_row_has_the_figures_of_the_trainers_gpu_and_none_of_a_cpu(tmp_path: Path) -> None:
    story, figures = pipelined_round(), {"perf/max_memory_allocated_gb": 1.5, "perf/gpu_utilization": 0.87}
    step = next(event for event in story.told if isinstance(event, Stepped))
    step.stats.gpu.update(figures)
    first, last = write(story, tmp_path / "metrics.jsonl")
    assert {name: first[name] for name in figures} == figures
    assert not {*figures} & {*last}


def test_a_row_has_the_largest_memory_of_the_engines_since_the_last_step(tmp_path: Path) -> None:
    story = pipelined_round()
    for peak in (1.5, 0.5):
        gpu = {"perf/max_memory_allocated_gb": peak, "perf/gpu_utilization": 0.9}
        for engine, figures in {"a": gpu, "b": {}}.items():
            story.tell(WeightsProbed(11.0, 12.0, engine, Arrival(1, 0.0, 0.0, 1.0, 0.5, gpu=figures)))
    first, last = write(story, tmp_path / "metrics.jsonl")
    assert {name: each for name, each in first.items() if "engine_max" in name} == {
        "perf/engine_max_memory_allocated_gb": 1.5
    }
    assert first["probe/time_s"] == 2.0 and not [name for name in last if "engine_max" in name]


def test_the_last_step_of_a_round_carries_its_report(tmp_path: Path) -> None:
    _, last = write(pipelined_round(), tmp_path / "metrics.jsonl")
    figures = {key: value for key, value in last.items() if key.startswith("round/")}
    assert figures == PIPELINED_FIGURES
    assert last["frac_reward_zero_std"] == 1.0
    assert last["completions/clipped_ratio"] == 0.5


def test_the_steps_of_a_round_add_up_to_it(tmp_path: Path) -> None:
    rows = write(pipelined_round(), tmp_path / "metrics.jsonl")
    assert sum(row["time/step"] for row in rows) == rows[-1]["round/main_time_s"]
    assert sum(row["time/wait"] for row in rows) == rows[-1]["round/wait_s"]
    assert sum(row["tokens/generated"] for row in rows) == rows[-1]["round/num_generated"]


def test_what_went_wrong_is_counted_by_reason(tmp_path: Path) -> None:
    story = pipelined_round()
    lost = SampleId(7, 0, 0)
    story.tell(
        SampleScored(11.0, lost, None, "not a number", 5),
        SampleScored(11.0, lost, None, "timeout", 5),
        SampleScored(12.0, lost, None, "timeout", 5),
        TokensWasted(12.0, lost, 5, "no reward"),
        TokensWasted(18.0, lost, 3, "deferred"),
        GroupEnded(12.0, 7, "dropped", "no reward"),
        GroupEnded(13.0, 8, "filtered", "zero variance"),
        RowSkipped(13.0, 9, "no prompt"),
        EngineStateChanged(13.0, "engine-0", "dead", "signal SIGKILL"),
        EngineStateChanged(14.0, "engine-0", "open", "it was restarted"),
    )
    first, last = write(story, tmp_path / "metrics.jsonl")
    assert first["completions/failed/not_a_number"] == 1
    assert first["completions/failed/timeout"] == 2
    assert first["tail/wasted_tokens/no_reward"] == 5
    assert first["groups/dropped/no_reward"] == 1
    assert first["groups/filtered/zero_variance"] == 1
    assert first["rows/skipped/no_prompt"] == 1
    assert first["engines/died/engine-0"] == 1
    assert last["tail/wasted_tokens/deferred"] == 3
    assert "tail/wasted_tokens/no_reward" not in last


def test_what_comes_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(
        TokensWasted(24.5, SampleId(7, 0, 0), 5, "surplus"), TokensWasted(30.0, SampleId(8, 0, 0), 2, "end")
    )
    _, last, after = write(story, tmp_path / "metrics.jsonl")
    assert last["tail/wasted_tokens/surplus"] == 5
    assert after == {
        "step": 2,
        "round": 0,
        "time": 25.0,
        "wall_time": WALL_TIME,
        "tail/wasted_tokens/end": 2,
    }


def test_the_least_that_a_guard_found_is_in_the_row_of_the_next_step(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(EssTaken(11.0, 0.9), EssTaken(13.0, 0.4))  # the first step ends at 17 s
    first, second = write(story, tmp_path / "metrics.jsonl")
    assert first["ess/guard"] == 0.4 and "ess/guard" not in second


def test_tokens_are_counted_over_all_steps_and_with_their_prompts(tmp_path: Path) -> None:
    first, second = write(pipelined_round(), tmp_path / "metrics.jsonl")
    assert (first["num_tokens"], first["tokens/trained"]) == (10 + 2 * 2, 10)
    assert (second["num_tokens"], second["tokens/trained"]) == (14 + 30 + 2 * 2, 30)


def test_staleness_counts_publications_and_lag_optimizer_steps(tmp_path: Path) -> None:
    story = pipelined_round()
    story.train(make_group(5, [3, 5], [0.0, 1.0]), 30, 31, 32, lag=2)
    stepped = story.told[-1]
    assert isinstance(stepped, Stepped)
    stepped.lags.steps[0] += 24
    stepped.lags.publications[0] += 24
    row = write(story, tmp_path / "metrics.jsonl")[-1]
    assert (row["staleness/mean"], row["staleness/max"]) == (2 * 8 / 32, 2)
    assert (row["lag/mean"], row["lag/max"], row["lag/tenth/9"]) == (6 * 8 / 32, 6, 6)
    assert row["carried/tokens"] == 8 / 32


def test_the_largest_lag_of_the_controller_is_in_the_row_of_the_next_step(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(ControllerLag(11.0, 0.25), ControllerLag(12.0, 0.5))
    first, second = write(story, tmp_path / "metrics.jsonl")
    assert first["time/controller_lag"] == 0.5 and "time/controller_lag" not in second


def test_a_failed_reward_that_counts_as_zero_is_counted_too(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(SampleScored(11.0, SampleId(7, 0, 0), 0.0, "reward timeout", 5))
    first, _ = write(story, tmp_path / "metrics.jsonl")
    assert first["completions/failed/reward_timeout"] == 1


def test_huge_rewards_have_finite_means_or_null(tmp_path: Path) -> None:
    story = Story()
    story.tell(RoundStarted(0.0, 0, 0))
    story.train(make_group(0, [4, 6], [1e308, 1e308]), 1, 2, 3)
    story.train(make_group(1, [4, 6], [1e308, 0.0]), 3, 4, 5)
    story.train(make_group(2, [4, 6], [1.7e308, -1.7e308]), 5, 6, 7)
    story.tell(RoundEnded(8.0, 0))
    rows = write(story, tmp_path / "metrics.jsonl")
    assert [row["reward"] for row in rows] == [1e308, 5e307, 0.0]
    assert rows[0]["reward_std"] == 0.0
    assert rows[1]["reward_std"] == pytest.approx(1e308 / math.sqrt(2))
    assert rows[2]["reward_std"] is None
    assert math.isfinite(rows[2]["round/reward"])


def test_what_is_parked_or_drafted_at_the_end_is_in_the_last_row(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(BooksClosed(31.0, 3, 70, 20))
    after = write(story, tmp_path / "metrics.jsonl")[-1]
    assert (after["groups/parked"], after["tokens/parked"], after["tokens/drafted"]) == (3, 70, 20)


def test_the_means_of_functions_and_of_sources_are_in_a_steps_row(tmp_path: Path) -> None:
    story = pipelined_round()
    stepped = [event for event in story.events if isinstance(event, Stepped)]
    first, second = stepped[0].samples
    first.reward_metrics, second.reward_metrics = {"math": 1.0, "format": 0.5}, {"format": 0.25}
    object.__setattr__(first.prompt, "source", "gsm8k")
    path = tmp_path / "metrics.jsonl"
    lines = write(story, path)
    kept = {key: value for key, value in lines[0].items() if key.startswith(("rewards/", "reward/"))}
    assert kept == {"rewards/format": 0.375, "rewards/math": 1.0, "reward/source/gsm8k": lines[0]["reward"]}
    assert not [key for key in lines[1] if key.startswith(("rewards/", "reward/"))]
    row = read_rows(path)[0]
    assert family(row, "rewards/") == {"format": 0.375, "math": 1.0}


def test_turns_calls_and_the_environments_tokens_are_figures_of_a_step_with_episodes(tmp_path: Path) -> None:
    story = pipelined_round()
    stepped = [event for event in story.events if isinstance(event, Stepped)]
    make_episode(stepped[0].samples[0])
    path = tmp_path / "metrics.jsonl"
    first, second = write(story, path)
    own = ("num_turns/", "environment_tokens/", "tools/")
    assert {key: value for key, value in first.items() if key.startswith(own)} == {
        "num_turns/mean": 1.0,
        "num_turns/max": 2,
        "environment_tokens/mean": 1.5,
        "tools/call_frequency": 0.5,
    }
    assert (first["num_tokens"], first["tokens/trained"]) == (17, 10), "3 more than without"
    assert not [key for key in second if key.startswith(own)]


def test_figures_of_evaluation_sets_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sets = {"gsm8k/avg@2": 0.5, "gsm8k/pass@2": 0.75}
    story = Story()
    story.tell(Evaluated(9.0, 0, 4, reward=0.5, mean_tokens=12.0, sets=sets))
    (line,) = write(story, path)
    assert (line["eval/gsm8k/avg@2"], line["eval/gsm8k/pass@2"]) == (0.5, 0.75)
    (row,) = read_rows(path)
    assert family(row, "eval/") == sets


def test_an_evaluation_is_a_row_of_its_own(tmp_path: Path) -> None:
    story = Story()
    story.tell(Evaluated(9.0, 0, 128, reward=0.5, mean_tokens=12.0))
    pipelined_round(story)
    story.tell(Evaluated(30.0, 1, 128, reward=0.75, mean_tokens=11.0, solved=0.5))
    rows = write(story, tmp_path / "metrics.jsonl")
    assert [row.get("eval/reward") for row in rows] == [0.5, None, None, 0.75]
    assert rows[0] == {
        "step": 0,
        "round": 0,
        "time": 9.0,
        "wall_time": WALL_TIME,
        "eval/reward": 0.5,
        "eval/mean_tokens": 12.0,
        "eval/num_samples": 128,
    }
    assert (rows[3]["step"], rows[3]["round"], rows[3]["eval/solved"]) == (2, 1, 0.5)


def test_a_figure_of_an_earlier_release_is_read_under_its_name_of_now() -> None:
    line = b'{"step": 2, "round": 1, "eval/accuracy": 0.5}'
    assert read_row(line) == {"step": 2, "round": 1, "eval/reward": 0.5}


def test_a_row_is_on_disk_when_the_next_step_or_the_round_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    events = pipelined_round().events
    play(events, writer := MetricsWriter(path), close=False)
    assert len(lines_of(path)) == 2
    writer.close()
    assert len(lines_of(path)) == 2


def test_a_resume_removes_the_rows_that_will_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    story = pipelined_round()
    pipelined_round(story, round=1, start_s=100.0)
    whole = write(story, path)
    with path.open("a") as file:
        file.write('{"step": 5, "rou')  # torn by a kill
    rewind_records(path, tmp_path, round=1, step=2)
    earlier, resumed = read_rows(path), MetricsWriter(path)
    assert lines_of(path) == whole[:2]
    again = Story(num_steps=2)
    again.tell(Evaluated(99.0, 1, 8, 0.5, 1.0))
    pipelined_round(again, round=1, start_s=100.0)
    play(again.events, resumed, earlier=earlier)
    assert lines_of(path)[2]["step"] == 2
    repeated = lines_of(path)[3:]
    assert [row["bias/length"] for row in repeated] == [-0.5, 0.0], "those of the last process"
    for row, before in zip(repeated, whole[2:], strict=True):
        row |= {name: value for name, value in before.items() if name.startswith("bias/")}
    assert lines_of(path)[:2] + repeated == whole


def test_a_resume_removes_later_samples_and_no_copy_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for name in (
        "round_000002.jsonl",
        "round_000003_old.jsonl",
        "round_000003.jsonl.gz",
        "round_notes.jsonl",
    ):
        for folder in (tmp_path, tmp_path / "eval"):
            (folder / name).write_text("")
    rewind_records(tmp_path / "metrics.jsonl", tmp_path, round=1, step=2)
    for folder in (tmp_path, tmp_path / "eval"):
        left = {path.name for path in folder.iterdir() if path.is_file()}
        assert left == {"round_000003_old.jsonl", "round_000003.jsonl.gz", "round_notes.jsonl"}


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    play([Evaluated(1.0, 0, 8, reward=math.inf, mean_tokens=1.0)], MetricsWriter(path))
    assert lines_of(path)[0]["eval/reward"] is None
    (row,) = read_rows(path)
    assert math.isnan(row["eval/reward"])


def test_a_line_that_a_kill_cut_short_is_dropped_and_a_damaged_one_before_it_is_named(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [f'{{"round": {n}, "step": {n}, "loss": 0.5}}\n' for n in range(3)]
    metrics.write_text("".join(lines)[:-9])
    rewind_records(metrics, tmp_path / "samples", round=9, step=9)
    assert metrics.read_text() == "".join(lines[:2])
    metrics.write_text("".join(["{" + lines[0][2:], *lines[1:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*it has a damaged line"):
        rewind_records(metrics, tmp_path / "samples", round=9, step=9)


def test_the_rows_that_are_read_are_those_that_were_written(tmp_path: Path) -> None:
    story = pipelined_round()
    story.tell(
        Evaluated(9.0, 0, 8, 0.5, 3.0),
        TokensWasted(12.0, SampleId(7, 0, 0), 5, "no reward"),
        BooksClosed(31.0, 3, 70),
    )
    rows = rows_of(story.events)
    play(story.events, MetricsWriter(path := tmp_path / "metrics.jsonl"))
    evaluation, first, last, end, closing = rows
    assert read_rows(path) == [evaluation, first, joined(last, end), closing]


@pytest.mark.parametrize("before, count", [(0, 0), (1, 2), (2, 4), (None, 4)])
def test_rows_are_kept_up_to_a_round(tmp_path: Path, before: int | None, count: int) -> None:
    path = tmp_path / "metrics.jsonl"
    story = pipelined_round()
    pipelined_round(story, round=1, start_s=100.0)
    write(story, path)
    if before is not None:
        rewind_records(path, tmp_path, round=before, step=0)
    assert len(steps_of(read_rows(path))) == count


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_row_that_lacks_its_round_is_named_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0, "step": 1, "loss": 1.0}\n{"rounf": 1, "step": 2, "loss": 1.0}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*damaged line \(KeyError: 'round'\): .*rounf"):
        rewind_records(path, tmp_path / "samples", round=1, step=2)
    assert path.read_bytes() == before
