"""What a checkpoint remembers: it comes back as it was, or says that it cannot."""

from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CheckpointError
from tailrace.ledger.state import STATE_FILE, GroupState, RunState
from tailrace.types import Group, Prompt, Sample, SampleId
from virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, ZERO_VARIANCE, change, newest, simulate


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """A group in any condition: started, finished, failed, parked, restarted."""
    num_samples = draw(st.integers(1, 4))
    need = draw(st.integers(1, num_samples))
    group = Group(Prompt(draw(st.integers(0, 99)), [1, 2]), need, [], num_launched=num_samples)
    group.attempt, group.deferrals = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    for number in range(num_samples):
        sample = Sample(
            SampleId(group.prompt.index, group.attempt, number), group, seed=draw(st.integers(0, 2**63 - 1))
        )
        for version in sorted(draw(st.sets(st.integers(0, 5)))):
            ids = draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=3))
            sample.extend(ids, [-0.1 * n for n in ids], version)
        sample.finish_reason = draw(st.sampled_from([None, "stop", "length"]))
        if sample.finish_reason:
            sample.reward = draw(st.none() | st.floats(-1, 1))
            sample.failure = draw(st.none() | st.just("reward timeout"))
            sample.text, sample.advantage = (
                draw(st.sampled_from(["", "12", "\u00e4\n"])),
                draw(st.floats(-2, 2)),
            )
            sample.reference_logprobs = [logprob - 0.5 for logprob in sample.logprobs]
            sample.fate = draw(st.sampled_from([None, "reward timeout"]))
        group.samples.append(sample)
    finished = draw(st.permutations([sample for sample in group.samples if sample.finish_reason]))
    group.kept = finished[:need]
    return group


def looks(group: Group) -> list[object]:
    """All that a group is, but for the pool's line and identity."""
    fields = ("id", "seed", "completion_ids", "logprobs", "spans", "num_tokens", "finish_reason", "text")
    judged = ("reference_logprobs", "reward", "failure", "advantage", "fate", "judged")
    return [
        (group.prompt, group.need, group.num_launched, group.attempt, group.born, group.deferrals),
        [sample.id for sample in group.kept],
        [[getattr(sample, field) for field in (*fields, *judged)] for sample in group.samples],
    ]


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(st.lists(groups(), max_size=3))
def test_groups_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, alive: list[Group]) -> None:
    folder = tmp_path_factory.mktemp("state")
    RunState("digest", round=3, cursor=7, parked=[GroupState.of(group) for group in alive]).save(folder)
    state = RunState.load(folder, "digest")
    prompts = {group.prompt.index: group.prompt for group in alive}
    revived = state.revive(state.parked, prompts.__getitem__)
    assert [looks(group) for group in revived] == [looks(group) for group in alive]


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_a_real_run_s_state_comes_back_to_the_last_count(tmp_path: Path, name: str) -> None:
    sim = change(SIM, rewards=change(SIM.rewards, failing=0.2))
    outcome = simulate(SCHEDULES_BY_NAME[name], SETTINGS, sim, algorithm=ZERO_VARIANCE)
    state = outcome.run.state()
    state.save(tmp_path)
    assert RunState.load(tmp_path, "") == state
    assert state.totals.wasted_tokens["zero variance"] > 0


def saved(folder: Path) -> Path:
    RunState("digest", round=1, parked=[GroupState(0, 1, 1, 0, None, 0, [])]).save(folder)
    return folder / STATE_FILE


def test_a_missing_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE} is missing; remove .* and resume again"):
        RunState.load(tmp_path, "digest")


def test_a_checkpoint_torn_at_any_byte_says_so(tmp_path: Path) -> None:
    file = saved(tmp_path)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"{STATE_FILE} is torn"):
            RunState.load(tmp_path, "digest")


def test_a_file_that_is_something_else_is_torn(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"[run]\nrounds = 3\n")
    with pytest.raises(CheckpointError, match="is torn"):
        RunState.load(tmp_path, "digest")


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another config"):
        RunState.load(tmp_path, "another")


def test_only_whole_checkpoints_have_their_name(tmp_path: Path) -> None:
    """A folder is renamed when all is in it; what a kill left behind is written over."""
    (tmp_path / "round_000000.partial").mkdir()
    (tmp_path / "round_000000.partial" / "garbage").write_text("of a former life")
    simulate(SCHEDULES_BY_NAME["serial"], change(SETTINGS, checkpoint_every=2), folder=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["round_000000", "round_000002", "round_000003"]
    assert newest(tmp_path) == tmp_path / "round_000003"
