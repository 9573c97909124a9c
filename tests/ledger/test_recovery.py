"""What a life that was killed leaves to the next one: at the last token, and by the rules."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.memory_store import MemoryStore, commit_at_once
from tailrace import clock
from tailrace.errors import BadRow, LedgerError
from tailrace.ledger.base import CheckpointRow, LifeRow, Origin, distance
from tailrace.ledger.journal import Journal
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.recovery import StartingPoint, first_life, next_life, totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import Recorder
from tailrace.types import Group, Prompt, Sample, SampleId, Span, Turn, noise_seed

pytestmark = pytest.mark.virtual

SEED = 3
TREE = ((1, 0, 0), (2, 1, 2), (3, 1, 1))


def turns(num_tokens: int) -> st.SearchStrategy[list[Turn]]:
    """Two turns, the second of which may not be answered."""
    first = Turn(1, "stop", ["4", "\u00e4"], [5, 6], "3 + 1", [{"role": "tool", "content": "4"}], True)
    results = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), max_size=2)
    last = st.builds(Turn, st.just(num_tokens), st.just("length"), results, st.just([]) | st.just([7]))
    return last.map(lambda turn: [first, turn])


@st.composite
def groups(draw: st.DrawFn, index: int) -> Group:
    """A living group in any condition: started, finished, failed, parked, restarted."""
    num_samples = draw(st.integers(1, 4))
    need = draw(st.integers(1, num_samples))
    group = Group(Prompt(index, [1, 2]), need, [], num_launched=num_samples)
    group.attempt, group.deferrals = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    for number in range(num_samples):
        id = SampleId(index, group.attempt, number)
        sample = Sample(id, group, seed=noise_seed(SEED, id))
        for version in sorted(draw(st.sets(st.integers(0, 5)))):
            ids = draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=3))
            sample.extend(ids, [-0.125 * n for n in range(len(ids))], version)
        sample.finish_reason = draw(st.sampled_from([None, "stop", "length"]))
        if sample.num_tokens > 1:
            sample.in_episode = draw(st.booleans())
            sample.turns = draw(st.just([]) | turns(sample.num_tokens))
        if sample.finish_reason:
            sample.reward = draw(st.none() | st.floats(-1, 1))
            sample.failure = draw(st.none() | st.just("reward timeout"))
            sample.reference_logprobs = [-0.25] * sample.num_tokens
            sample.reward_metrics = draw(st.just({}) | st.just({"format": 0.5, "math/length": 3.0}))
            sample.reward_columns = {"math/gold": "12"} if sample.reward_metrics else {}
            sample.text = draw(st.sampled_from(["", "12", "\u00e4\n"]))
        group.samples.append(sample)
    group.kept = draw(st.permutations([sample for sample in group.samples if sample.finish_reason]))[:need]
    return group


def looks(group: Group) -> list[object]:
    """All that a group is, but for the pool's line and identity, and what materialising sets."""
    fields = (
        "id",
        "seed",
        "completion_ids",
        "behavior_logprobs",
        "spans",
        "num_tokens",
        "finish_reason",
        "turns",
        "in_episode",
        "text",
    )
    judged = ("reference_logprobs", "reward", "reward_metrics", "reward_columns", "failure", "fate", "scored")
    return [
        (
            group.prompt.index,
            group.num_required,
            group.num_launched,
            group.attempt,
            group.oldest_version,
            group.deferrals,
        ),
        [sample.id for sample in group.kept],
        [[getattr(sample, field) for field in (*fields, *judged)] for sample in group.samples],
    ]


def prompt_of(index: int) -> Prompt:
    return Prompt(index, [1, 2])


class Life:
    """A ledger and its journal, driven by hand."""

    def __init__(self, store: Store, starting_point: StartingPoint | None = None) -> None:
        starting_point = starting_point or first_life()
        store.commit(starting_point.opening)
        self.store, self.starting_point = store, starting_point
        self.journal = Journal(partial(commit_at_once, store), starting_point, flush_s=1.0)
        self.ledger = Ledger(Recorder(), starting_point.totals, self.journal)
        self.journal.follow(self.ledger)
        self.ledger.recall([*starting_point.partial_rollouts, *starting_point.interrupted])

    def draw(self, *lengths: int, version: int = 0) -> Group:
        """A group of finished samples, with tokens."""
        index = self.ledger.totals.num_drawn
        group = Group(prompt_of(index), len(lengths), [], num_launched=len(lengths))
        for number, length in enumerate(lengths):
            id = SampleId(index, 0, number)
            sample = Sample(id, group, seed=noise_seed(SEED, id), finish_reason="stop", reward=1.0)
            sample.extend(list(range(length)), [0.0] * length, version)
            group.samples.append(sample)
        group.kept = list(group.samples)
        self.ledger.draw(group)
        return group

    async def commit_checkpoint(
        self, folder: Path, round: int, step: int, parked: list[Group] | None = None
    ) -> None:
        name = f"round_{round:06d}"
        (folder / name).mkdir()
        await self.journal.commit_checkpoint(
            CheckpointRow(
                *(self.starting_point.life, round, round, step, name),
                partial_rollouts=[group.prompt.index for group in parked or []],
                longest={7: round},
                steps_at={round: step},
                anchors={7: [0.5 * round, 1.0]},
            )
        )

    def next(
        self, folder: Path, num_generated: int, prompt_of: Callable[[int], Prompt] = prompt_of
    ) -> StartingPoint:
        return next_life(
            read_ledger(self.store),
            config='{"life": 2}',
            checkpoints=folder,
            num_generated=num_generated,
            prompt_of=prompt_of,
            seed=SEED,
        )


def by_hand(main: Callable[[], object]) -> None:
    clock.run(main(), virtual=True)  # type: ignore[arg-type]


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(st.data())
def test_groups_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    alive = [data.draw(groups(index)) for index in range(data.draw(st.integers(0, 3)))]
    folder = tmp_path_factory.mktemp("starting_point")

    async def main() -> None:
        life = Life(Store.create(folder / "ledger.sqlite"))
        for group in alive:
            life.ledger.draw(group)
        await life.commit_checkpoint(folder, 5, 7, parked=alive[:1])
        starting_point = life.next(folder, sum(group.num_tokens for group in alive))
        assert [looks(group) for group in starting_point.partial_rollouts] == [
            looks(group) for group in alive[:1]
        ]
        assert [looks(group) for group in starting_point.interrupted] == [looks(group) for group in alive[1:]]
        base = starting_point.base
        assert (starting_point.life, base.round, base.version, base.step) == (2, 5, 5, 7)
        assert (base.longest, base.steps_at) == ({7: 5}, {5: 7})
        assert starting_point.base.anchors == {7: [2.5, 1.0]}
        assert starting_point.base.checkpoint == "round_000005" and starting_point.totals.num_drawn == len(
            alive
        )

    by_hand(main)


async def test_what_was_trained_after_the_mark_lives_again_and_what_was_before_does_not(
    tmp_path: Path,
) -> None:
    life = Life(MemoryStore())
    before, after, parked = life.draw(4, 6), life.draw(3), life.draw(2)
    life.ledger.train(before.samples, 1)
    await life.commit_checkpoint(tmp_path, 1, 1, parked=[parked])
    life.ledger.train(after.samples, 2)
    await life.journal.finish()
    starting_point = life.next(tmp_path, 15)
    assert [group.prompt.index for group in starting_point.partial_rollouts] == [2]
    assert [group.prompt.index for group in starting_point.interrupted] == [1]
    assert starting_point.interrupted[0].samples[0].completion_ids == [0, 1, 2]
    assert starting_point.totals.trained_tokens == 10 and starting_point.totals.groups == {"trained": 1}
    again = Life(life.store, starting_point)
    again.ledger.train(starting_point.interrupted[0].samples, 2)
    await again.journal.finish()
    trainings = read_ledger(life.store).trainings.values()
    assert [(t.prompt, t.life, t.step, t.undone) for t in trainings] == [
        (0, 1, 1, None), (0, 1, 1, None), (1, 1, 2, 2), (1, 2, 2, None)
    ]  # fmt: skip


async def test_what_was_filtered_dropped_or_wasted_stays_so(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    await life.commit_checkpoint(tmp_path, 0, 0)
    dropped = life.draw(4)
    life.ledger.waste(dropped.samples[0], "low ess")
    life.ledger.end(dropped, "dropped", "low ess")
    await life.journal.finish()
    starting_point = life.next(tmp_path, 4)
    assert starting_point.interrupted == [] and starting_point.totals.wasted_tokens == {"low ess": 4}
    assert starting_point.totals.groups == {"dropped": 1} and starting_point.totals.num_drawn == 1


async def test_tokens_that_never_reached_the_ledger_are_the_waste_of_the_crash(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    life.draw(4)
    await life.journal.finish()
    starting_point = life.next(tmp_path, 11)
    assert starting_point.totals.wasted_tokens == {"crash": 7}
    again = Life(life.store, starting_point)
    again.ledger.check(11)
    assert again.next(tmp_path, 13).totals.wasted_tokens == {"crash": 9}


async def test_a_rolled_back_group_whose_tokens_were_pruned_begins_afresh(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    await life.commit_checkpoint(tmp_path, 0, 0)
    group = life.draw(4, 5)
    life.ledger.train(group.samples, 1)
    await life.commit_checkpoint(tmp_path, 1, 1)
    assert set(read_ledger(life.store).tokens) == {SampleId(0, 0, 0), SampleId(0, 0, 1)}
    await life.commit_checkpoint(tmp_path, 2, 2)
    assert read_ledger(life.store).tokens == {}
    for name in ("round_000001", "round_000002"):
        (tmp_path / name).rmdir()
    starting_point = life.next(tmp_path, 9)
    assert starting_point.base.round == 0 and starting_point.totals.wasted_tokens == {"pruned": 9}
    (group,) = starting_point.interrupted
    assert (group.samples, group.num_launched, group.attempt, group.last_attempt) == ([], 2, 1, 1)
    Life(life.store, starting_point).ledger.check(9)


async def test_members_of_later_attempts_and_replacements_come_back_beside_those_that_began(
    tmp_path: Path,
) -> None:
    """Of four samples number 1 lost its version twice, and number 2 failed and was replaced by number 4."""
    life = Life(MemoryStore())
    group = life.draw(3, 4, 5, 6)
    for attempt, number in ((1, 1), (2, 1), (2, 4)):
        id = SampleId(0, attempt, number)
        group.samples.append(sample := Sample(id, group, seed=noise_seed(SEED, id)))
        sample.extend([7, 8], [0.0, 0.0], 1)
    one, two, first = group.samples[1], group.samples[2], group.samples[4]
    for sample, reason in ((one, "version gone"), (first, "version gone"), (two, "raised")):
        group.samples.remove(sample)
        life.ledger.waste(sample, reason)
    group.kept, group.num_replaced, group.last_attempt = [group.samples[0]], 1, 2
    await life.journal.finish()
    (restored,) = life.next(tmp_path, 24).interrupted
    assert [sample.id[1:] for sample in restored.samples] == [(0, 0), (2, 1), (0, 3), (2, 4)]
    assert restored.samples[1].seed == one.seed
    assert [sample.id[1:] for sample in restored.kept] == [(0, 0)]
    counts = restored.num_launched, restored.num_replaced, restored.attempt, restored.last_attempt
    assert counts == (4, 1, 0, 2)


async def test_the_rest_of_a_group_that_was_trained_in_part_is_waste(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    group = life.draw(4, 5)
    life.ledger.train(group.samples[:1], 1)
    await life.commit_checkpoint(tmp_path, 1, 1)
    life.ledger.train(group.samples[1:], 2)
    await life.journal.finish()
    starting_point = life.next(tmp_path, 9)
    assert starting_point.interrupted == [] and starting_point.totals.groups == {"trained": 1}
    assert starting_point.totals.trained_tokens == 4 and starting_point.totals.wasted_tokens == {
        "interrupted": 5
    }


async def test_versions_that_a_server_corrects_later_are_stored(tmp_path: Path) -> None:
    life = Life(Store.create(tmp_path / "ledger.sqlite"))
    group = life.draw(10, version=7)
    await life.commit_checkpoint(tmp_path, 7, 7)
    group.samples[0].attribute(0, [Span(3, 6), Span(7, 4)])
    await life.journal.finish()
    (restored,) = life.next(tmp_path, 10).interrupted
    assert restored.samples[0].spans == [Span(3, 6), Span(7, 4)]
    assert restored.oldest_version == 3


@pytest.mark.parametrize("refused", [False, True])
async def test_a_group_whose_prompt_is_empty_is_dropped_with_the_reason(
    tmp_path: Path, refused: bool
) -> None:
    """refused: the data refuse the row now."""

    def now(index: int) -> Prompt:
        if index == 1 and refused:
            raise BadRow("empty prompt")
        return Prompt(index, [] if index == 1 else [1, 2])

    life = Life(Store.create(tmp_path / "ledger.sqlite"))
    groups = [life.draw(3), life.draw(4), life.draw(5)]
    await life.commit_checkpoint(tmp_path, 1, 1, parked=groups[1:])
    for _ in range(2):  # the second time it has its fate
        start = life.next(tmp_path, 12, prompt_of=now)
        assert [group.prompt.index for group in start.partial_rollouts] == [2]
        assert [group.prompt.index for group in start.interrupted] == [0]
        assert start.totals.groups == {"dropped": 1}
        assert start.totals.wasted_tokens == {"empty prompt": 4}
        life.store.commit(start.opening)
    assert read_ledger(life.store).groups[1].reason == "empty prompt"


async def test_a_dead_branch_s_tokens_are_as_old_as_the_way_back_and_on(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    await life.commit_checkpoint(tmp_path, 2, 2)
    life.draw(1, version=1)
    life.draw(1, version=2)
    life.draw(1, version=4)
    await life.journal.finish()
    starting_point = life.next(tmp_path, 3)
    assert starting_point.base.version == 2
    assert [group.oldest_version for group in starting_point.interrupted] == [1, 2, 0]
    again = Life(life.store, starting_point)
    again.starting_point.interrupted[2].samples[0].extend([7], [0.0], 3)
    await again.journal.finish()
    row = read_ledger(life.store).samples[SampleId(2, 0, 0)]
    assert row.spans == [Origin(1, 4, 1), Origin(2, 3, 1)]


@pytest.mark.parametrize(
    ("one", "other", "publications"),
    [
        ((2, 5), (2, 4), 1),
        ((2, 5), (1, 2), 3),
        ((2, 5), (1, 4), 5),
        ((2, 2), (1, 2), 0),
        ((3, 3), (2, 4), 5),
        ((3, 1), (1, 1), 0),
    ],
)
def test_distances_in_the_tree_of_lives(
    one: tuple[int, int], other: tuple[int, int], publications: int
) -> None:
    """Life 2 began at version 2 of life 1, and life 3 at version 1 of it."""
    lives = {life: LifeRow(life, parent, 0, version, 0, 0) for life, parent, version in TREE}
    assert distance(lives, one, other) == distance(lives, other, one) == publications


def test_each_life_keeps_the_config_with_which_it_ran(tmp_path: Path) -> None:
    life = Life(MemoryStore(), first_life('{"life": 1}'))
    Life(life.store, life.next(tmp_path, 0))
    assert [row.config for row in read_ledger(life.store).lives.values()] == ['{"life": 1}', '{"life": 2}']


def test_nothing_is_changed_before_the_opening_is_committed(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    life.next(tmp_path, 0)
    assert len(read_ledger(life.store).lives) == 1


async def test_engines_that_counted_less_than_the_ledger_knows_are_of_another_run(tmp_path: Path) -> None:
    life = Life(MemoryStore())
    life.draw(4)
    await life.journal.finish()
    with pytest.raises(LedgerError, match="knows of 4 tokens and the engines counted 3: the counts"):
        life.next(tmp_path, 3)


@pytest.mark.virtual
async def test_masked_tokens_are_a_fate_of_their_own_that_a_kill_undoes_with_the_training(
    tmp_path: Path,
) -> None:
    """30 tokens are trained in step 1, of which 12 are masked; 5 masked ones after the checkpoint."""
    life = Life(MemoryStore())
    for step, (lengths, num_masked) in enumerate([((10, 20), 12), ((5,), 5)], 1):
        group = life.draw(*lengths)
        group.samples[-1].num_masked = num_masked
        life.ledger.train(group.samples, step)
        if step == 1:
            await life.commit_checkpoint(tmp_path, round=1, step=1)
    await life.journal.finish()
    totals = totals_of(read_ledger(life.store))
    assert (totals.trained_tokens, totals.masked_tokens) == (18, 17)
    assert totals == life.ledger.totals and totals.num_known_tokens == 35
    totals = life.next(tmp_path, 35).totals
    assert (totals.trained_tokens, totals.masked_tokens, totals.undone_tokens) == (18, 12, 5)
