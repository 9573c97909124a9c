"""Recovers the state of a run from its ledger: where the next life begins, and with which groups.

The base is the newest mark whose checkpoint exists. What was trained after the base went into weights that
are lost: these trainings are undone, and their groups are restored with their tokens. Samples and groups that
were filtered, dropped or wasted keep their fate, and no prompt is drawn twice. Groups that were parked at the
base are parked again. All other groups without a fate were interrupted; they come first when the schedule
asks for prompts.

The staleness of a restored token is counted along the tree of lives (lineage.py). A schedule that promises a
bound restarts groups with tokens of a dead branch, because their staleness could exceed the bound. Without a
bound they are continued, or trained as they are.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tailrace.errors import LedgerError
from tailrace.ledger.base import (
    FORMAT,
    Books,
    Cut,
    GroupRow,
    LifeRow,
    MarkRow,
    Origin,
    Row,
    RunRow,
    SampleRow,
    TrainingRow,
)
from tailrace.ledger.ledger import Totals
from tailrace.ledger.lineage import distance
from tailrace.types import Group, Prompt, Sample, SampleId, noise_seed


@dataclass(slots=True)
class StartingPoint:
    """The state with which a life begins. The defaults are those of a new run."""

    run: RunRow = field(default_factory=lambda: RunRow(FORMAT, 0, 0))
    life: int = 1
    round: int = 0
    version: int = 0
    step: int = 0
    checkpoint: str | None = None
    """Name of the checkpoint folder of the base; None: the life begins with the model of the config."""
    num_generated: int = 0
    """Tokens produced by the engines of all earlier lives, by their own count."""
    totals: Totals = field(default_factory=Totals)
    longest: dict[int, int] = field(default_factory=dict)
    """Longest response to each row of the data when it was last trained, in tokens."""
    steps_at: dict[int, int] = field(default_factory=dict)
    """Optimizer steps at each publication."""
    partial_rollouts: list[Group] = field(default_factory=list)
    """Groups that were parked at the base, in their order."""
    interrupted: list[Group] = field(default_factory=list)
    """All other groups without a fate, in the order drawn."""
    rows: dict[Group, GroupRow] = field(default_factory=dict)
    """Stored row of each group without a fate."""
    dead: set[Group] = field(default_factory=set)
    """Groups without a fate that have tokens of a dead branch."""
    origins: dict[Sample, list[Origin]] = field(default_factory=dict)
    """Origins of the tokens of each sample without a fate."""
    marks: list[MarkRow] = field(default_factory=list)
    """The base, if there is one."""
    trained: list[tuple[int, SampleRow]] = field(default_factory=list)
    """(step, sample): samples trained before the base whose tokens are still stored."""
    opening: Cut = field(default_factory=lambda: Cut([]))
    """The rows to commit when the life begins. Until then the store is unchanged."""


def first_life(config: str = "{}") -> StartingPoint:
    """Return the state with which a new run begins.

    Args:
        config: the resolved config, as JSON.
    """
    run = RunRow(FORMAT, 0, 0)
    return StartingPoint(run, opening=Cut([run, LifeRow(1, 0, 0, 0, 0, 0, config)]))


def next_life(
    books: Books,
    *,
    name: str,
    config: str = "{}",
    checkpoints: Path,
    num_generated: int,
    prompt_of: Callable[[int], Prompt],
    seed: int,
) -> StartingPoint:
    """Return the state with which a resumed run begins. The store changes only when `opening` is committed.

    Args:
        name: name of the ledger, for errors.
        config: the resolved config of the new life, as JSON. The caller has checked that it continues the
            run.
        checkpoints: folder of the checkpoints; a mark whose checkpoint was removed is ignored.
        num_generated: tokens produced by the engines of all lives, by their own count.
        prompt_of: returns the prompt of an index.
        seed: seed of the run.

    Raises:
        LedgerError: the ledger knows more tokens than the engines produced.
    """
    life = max(books.lives) + 1
    base = _base(books, checkpoints)
    rows: list[Row] = [
        msgspec.structs.replace(mark, undone=life)
        for mark in books.marks
        if mark.undone is None and _place(mark) > _place(base)
    ]
    rows += [row for row in _rolled_back(books, base, life) if _put(books, row)]
    totals = totals_of(books)
    known = totals.num_known_tokens + held_tokens_of(books)
    if known > num_generated:
        raise LedgerError(
            f"{name} knows of {known} tokens and the engines counted {num_generated}: the counts beside it "
            "are missing or older; restore the whole output directory, or begin a new run in another one"
        )
    crash = num_generated - known
    born = LifeRow(life, base.life, base.round, base.version, base.step, crash, config)
    books.lives[life] = born
    totals.wasted_tokens.update({"crash": crash} if crash else {})
    starting_point = StartingPoint(
        books.run,
        life=life,
        round=base.round,
        version=base.version,
        step=base.step,
        checkpoint=base.checkpoint or None,
        num_generated=num_generated,
        totals=totals,
        longest=msgspec.json.decode(base.longest, type=dict[int, int]),
        steps_at=msgspec.json.decode(base.steps_at, type=dict[int, int]),
        marks=[base] if base.checkpoint else [],
        trained=[
            (training.step, books.samples[training.id])
            for training in books.trainings.values()
            if training.undone is None and not books.samples[training.id].pruned
        ],
        opening=Cut([*rows, born]),
    )
    _revive(
        starting_point, books, msgspec.json.decode(base.partial_rollouts, type=list[int]), prompt_of, seed
    )
    return starting_point


def totals_of(books: Books) -> Totals:
    """Return the sums over all samples and groups with a fate."""
    totals = Totals(books.run.num_drawn, evaluated_tokens=books.run.evaluated_tokens)
    for sample in books.samples.values():
        if sample.fate == "trained":
            totals.trained_tokens += sample.num_tokens
        elif sample.fate is not None:
            totals.wasted_tokens[sample.fate] += sample.num_tokens
    crash = sum(life.crash_tokens for life in books.lives.values())
    totals.wasted_tokens.update({"crash": crash} if crash else {})
    totals.groups.update(group.fate for group in books.groups.values() if group.fate is not None)
    skipped = books.run.num_drawn - len(books.groups)  # unusable rows have no group
    totals.groups.update({"dropped": skipped} if skipped else {})
    return totals


def held_tokens_of(books: Books) -> int:
    """Return the number of tokens of the samples without a fate."""
    return sum(sample.num_tokens for sample in books.samples.values() if sample.fate is None)


def _base(books: Books, checkpoints: Path) -> MarkRow:
    marks = [mark for mark in books.marks if mark.undone is None and (checkpoints / mark.checkpoint).is_dir()]
    return max(marks, key=_place, default=MarkRow(1, 0, 0, 0, "", "[]"))


def _place(mark: MarkRow) -> tuple[int, int]:
    """Return the place of a mark in the run. Of two marks in a round the one with more steps is newer."""
    return mark.round, mark.step


def _put(books: Books, row: Row) -> bool:
    """Put a row into the books. Return whether that changed them."""
    match row:
        case GroupRow():
            known, books.groups[row.prompt] = books.groups[row.prompt] == row, row
        case SampleRow():
            known, books.samples[row.id] = books.samples[row.id] == row, row
        case TrainingRow():
            known, books.trainings[row.life, row.id] = False, row
        case _:
            raise AssertionError(row)
    return not known


def _rolled_back(books: Books, base: MarkRow, life: int) -> Iterable[Row]:
    """Yield the rows that change because what came after the base is undone."""
    undone = [t for t in books.trainings.values() if t.undone is None and t.step > base.step]
    yield from (msgspec.structs.replace(training, undone=life) for training in undone)
    alive = {training.id for training in undone}
    for prompt, members in _members(books).items():
        yield from _rolled_back_group(books.groups[prompt], members, alive)


def _rolled_back_group(group: GroupRow, members: Sequence[SampleRow], alive: Set[SampleId]) -> Iterable[Row]:
    """Yield the rows of a group and its samples after the roll-back.

    Args:
        members: samples of every attempt.
        alive: samples whose training is undone.
    """
    living = [sample for sample in members if sample.fate is None or sample.id in alive]
    if any(sample.fate == "trained" and sample.id not in alive for sample in members):
        # Its samples were trained in different steps, some before the base. The rest cannot be trained.
        yield msgspec.structs.replace(group, fate="trained", reason="trained")
        yield from (msgspec.structs.replace(sample, fate="interrupted") for sample in living)
    elif group.fate in ("filtered", "dropped"):  # its aborts were under way
        yield from (msgspec.structs.replace(sample, fate=group.reason) for sample in living)
    elif any(sample.pruned for sample in living):
        attempt = group.attempt + 1
        yield msgspec.structs.replace(group, fate=None, reason="", attempt=attempt, kept="[]")
        yield from (msgspec.structs.replace(sample, fate="pruned") for sample in living)
    else:
        yield msgspec.structs.replace(group, fate=None, reason="")
        for sample in living:  # the abort of one of an earlier attempt was under way
            fate = None if sample.attempt == group.attempt else "interrupted"
            yield msgspec.structs.replace(sample, fate=fate)


def _members(books: Books) -> dict[int, list[SampleRow]]:
    """Return the samples of every attempt, by prompt."""
    members: dict[int, list[SampleRow]] = {prompt: [] for prompt in books.groups}
    for sample in books.samples.values():
        members[sample.prompt].append(sample)
    return members


def _revive(
    starting_point: StartingPoint,
    books: Books,
    partial_rollouts: Sequence[int],
    prompt_of: Callable[[int], Prompt],
    seed: int,
) -> None:
    """Restore each group without a fate: parked, or among the interrupted ones in the order drawn."""
    members = _members(books)
    living = {
        row.prompt: _group(starting_point, books, row, members[row.prompt], prompt_of(row.prompt), seed)
        for row in books.groups.values()
        if row.fate is None
    }
    starting_point.partial_rollouts = [living.pop(prompt) for prompt in partial_rollouts if prompt in living]
    starting_point.interrupted = list(living.values())


def _group(
    starting_point: StartingPoint,
    books: Books,
    row: GroupRow,
    members: Sequence[SampleRow],
    prompt: Prompt,
    seed: int,
) -> Group:
    group = Group(
        prompt,
        row.num_required,
        [],
        num_launched=row.num_launched,
        attempt=row.attempt,
        deferrals=row.deferrals,
    )
    group.round_drawn = row.round
    kept = msgspec.json.decode(row.kept, type=list[int])
    rows = {sample.number: sample for sample in members if sample.attempt == row.attempt}
    samples = {
        number: _sample(starting_point, books, sample, group, seed)
        for number, sample in rows.items()
        if sample.fate is None or number in kept
    }
    unseen = set() if rows else range(row.num_launched)  # this roll-back restarted it
    for number in unseen:
        id = SampleId(row.prompt, row.attempt, number)
        samples[number] = Sample(id, group, seed=noise_seed(seed, id))
    group.samples = [samples[number] for number in sorted(samples)]
    group.kept = [samples[number] for number in kept]
    starting_point.rows[group] = row
    return group


def _sample(starting_point: StartingPoint, books: Books, row: SampleRow, group: Group, seed: int) -> Sample:
    sample = Sample(
        row.id,
        group,
        seed=noise_seed(seed, row.id),
        finish_reason=row.finish_reason,
        reference_logprobs=list(array("f", row.reference_logprobs)),
        text=row.text,
        reward=row.reward,
        failure=row.failure,
        fate=row.fate,
    )
    starting_point.origins[sample] = row.origins
    here = (starting_point.life, starting_point.version)
    for origin in row.origins:
        age = distance(books.lives, here, (origin.life, origin.version))
        sample.grow(origin.num_tokens, starting_point.version - age)
        if age != starting_point.version - origin.version:
            starting_point.dead.add(group)
    for tokens in books.tokens.get(row.id, ()):
        sample.completion_ids.extend(array("i", tokens.ids))
        sample.behavior_logprobs.extend(array("f", tokens.logprobs))
    return sample
