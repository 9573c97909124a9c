"""Recovers the state of a run from its ledger: where the next life begins, and with which groups.

The base is the newest mark whose checkpoint exists. What was trained after the base went into weights that
are lost: these trainings are undone, and their groups are restored with their tokens. Samples and groups that
were filtered, dropped or wasted keep their fate. Groups that were parked at the base are parked again. The
other groups without a fate come first when the schedule asks for prompts.

The staleness of a restored token is counted along the tree of lives (`ledger/base.py`). A schedule that
promises a bound restarts groups with tokens of a dead branch, because their staleness could exceed the bound.
Without a bound they are continued, or trained as they are.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tailrace.errors import BadRow, LedgerError
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
    Store,
    TokensRow,
    TrainingRow,
    distance,
)
from tailrace.ledger.ledger import Totals
from tailrace.types import Group, Prompt, Sample, SampleId, noise_seed


@dataclass(slots=True)
class StartingPoint:
    """The state with which a life begins. The defaults are those of a new run."""

    run: RunRow = field(default_factory=lambda: RunRow(FORMAT, 0, 0))
    life: int = 1
    round: int = 0
    version: int = 0
    step: int = 0
    cut_steps: int = 0
    """Optimizer steps made in rounds that were interrupted and begin again."""
    checkpoint: str | None = None
    """Name of the checkpoint folder of the base; None: the life begins with the model of the config."""
    num_generated: int = 0
    """Tokens produced by the engines of all earlier lives, by their own count."""
    totals: Totals = field(default_factory=Totals)
    longest: dict[int, int] = field(default_factory=dict)
    """Longest response to each row of the data when it was last trained, in tokens."""
    steps_at: dict[int, int] = field(default_factory=dict)
    """Optimizer steps at each publication."""
    anchors: dict[int, float] = field(default_factory=dict)
    """Longest test case of the correct responses to each prompt, in seconds."""
    partial_rollouts: list[Group] = field(default_factory=list)
    """Groups that were parked at the base, in their order."""
    interrupted: list[Group] = field(default_factory=list)
    """All other groups without a fate, in the order drawn."""
    rows: dict[Group, GroupRow] = field(default_factory=dict)
    """Stored row of each group without a fate."""
    dead: set[Group] = field(default_factory=set)
    """Groups without a fate that have tokens of a dead branch (ledger/base.py)."""
    origins: dict[Sample, list[Origin]] = field(default_factory=dict)
    """Origins of the tokens of each sample without a fate."""
    marks: list[MarkRow] = field(default_factory=list)
    """The base, if there is one."""
    missing: list[MarkRow] = field(default_factory=list)
    """The marks after the base, whose checkpoints were removed."""
    best: tuple[float, int] | None = None
    """Accuracy and round of the best evaluation that has a checkpoint; None: there is none."""
    opening: Cut = field(default_factory=lambda: Cut([]))
    """The rows to commit when the life begins. Until then the store is unchanged."""


def first_life(config: str = "{}") -> StartingPoint:
    """Return the state with which a new run begins. `config`: the resolved config, as JSON."""
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
        config: the resolved config of the new life, as JSON, checked with `config.check_resumable`.
        checkpoints: folder of the checkpoints; a mark whose checkpoint was removed is ignored.
        num_generated: tokens produced by the engines of all lives, by their own count.

    Raises:
        LedgerError: the ledger knows more tokens than the engines produced.
    """
    life = max(books.lives) + 1
    base = _base(books, checkpoints)
    later = [mark for mark in books.marks if mark.undone is None and _place(mark) > _place(base)]
    rows: list[Row] = [replace(mark, undone=life) for mark in later]
    rows += _roll_back(books, base, life)
    prompt_of = cache(prompt_of)
    rows += _drop_without_prompt(books, prompt_of)
    known = totals_of(books).num_known_tokens + held_tokens_of(books)
    if known > num_generated:
        raise LedgerError(
            f"{name} knows of {known} tokens and the engines counted {num_generated}: the counts beside it "
            "are missing or older; restore the whole output directory, or begin a new run in another one"
        )
    born = LifeRow(life, base.life, base.round, base.version, base.step, num_generated - known, config)
    books.lives[life] = born
    starting_point = StartingPoint(
        books.run,
        life=life,
        round=base.round,
        version=base.version,
        step=base.step,
        cut_steps=base.cut_steps,
        checkpoint=base.checkpoint or None,
        num_generated=num_generated,
        totals=totals_of(books),
        longest=msgspec.json.decode(base.longest, type=dict[int, int]),
        steps_at=msgspec.json.decode(base.steps_at, type=dict[int, int]),
        anchors=msgspec.json.decode(base.anchors, type=dict[int, float]),
        marks=[base] if base.checkpoint else [],
        missing=later,
        opening=Cut([*rows, born]),
    )
    parked = msgspec.json.decode(base.partial_rollouts, type=list[int])
    _Restoration(starting_point, books, prompt_of, seed).restore(parked)
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


def _roll_back(books: Books, base: MarkRow, life: int) -> list[Row]:
    """Undo in the books what came after the base. Return the rows that changed."""
    undone = {
        key: replace(training, undone=life)
        for key, training in books.trainings.items()
        if training.undone is None and training.step > base.step
    }
    books.trainings |= undone
    alive = {training.id for training in undone.values()}
    changed: list[Row] = [*undone.values()]
    for prompt, members in _members(books).items():
        group, samples = _rolled_back(books.groups[prompt], members, alive)
        changed += [group] if group != books.groups[prompt] else []
        changed += [sample for sample in samples if sample != books.samples[sample.id]]
        books.groups[prompt] = group
        books.samples.update((sample.id, sample) for sample in samples)
    return changed


def _rolled_back(
    group: GroupRow, members: Sequence[SampleRow], alive: Set[SampleId]
) -> tuple[GroupRow, list[SampleRow]]:
    """Return a group, and its samples that had no fate or have none any longer, after the roll-back.

    Args:
        members: samples of every attempt.
        alive: samples whose training is undone.
    """
    living = [sample for sample in members if sample.fate is None or sample.id in alive]
    if any(sample.fate == "trained" and sample.id not in alive for sample in members):
        # Its samples were trained in different steps, some before the base. The rest cannot be trained.
        group, fate = replace(group, fate="trained", reason="trained"), "interrupted"
    elif group.fate in ("filtered", "dropped"):  # its aborts were under way
        fate = group.reason
    elif any(sample.pruned for sample in living):
        group = replace(group, fate=None, reason="", attempt=group.attempt + 1, kept="[]")
        fate = "pruned"
    else:
        group = replace(group, fate=None, reason="")
        fates = {group.attempt: None}  # the abort of a sample of an earlier attempt was under way
        return group, [replace(each, fate=fates.get(each.attempt, "interrupted")) for each in living]
    return group, [replace(sample, fate=fate) for sample in living]


def _drop_without_prompt(books: Books, prompt_of: Callable[[int], Prompt]) -> list[Row]:
    """Drop in the books the groups without a fate whose prompt cannot be used, now that prompts are checked.
    Return the rows that changed."""
    changed: list[Row] = []
    members = _members(books)
    for group in [group for group in books.groups.values() if group.fate is None]:
        try:
            reason = "" if prompt_of(group.prompt).ids else "empty prompt"
        except BadRow as bad:
            reason = bad.reason
        if reason:
            books.groups[group.prompt] = replace(group, fate="dropped", reason=reason)
            lost = [replace(each, fate=reason) for each in members[group.prompt] if each.fate is None]
            books.samples.update((sample.id, sample) for sample in lost)
            changed += [books.groups[group.prompt], *lost]
    return changed


def _members(books: Books) -> dict[int, list[SampleRow]]:
    """Return the samples of every attempt, by prompt."""
    members: dict[int, list[SampleRow]] = {prompt: [] for prompt in books.groups}
    for sample in books.samples.values():
        members[sample.prompt].append(sample)
    return members


@dataclass(frozen=True, slots=True)
class _Restoration:
    """Restores the groups without a fate into a starting point."""

    starting_point: StartingPoint
    books: Books
    prompt_of: Callable[[int], Prompt]
    seed: int

    def restore(self, partial_rollouts: Sequence[int]) -> None:
        """Restore each group: parked, or among the interrupted ones in the order drawn."""
        members, groups = _members(self.books), self.books.groups.values()
        living = {row.prompt: self._group(row, members[row.prompt]) for row in groups if row.fate is None}
        parked = [living.pop(prompt) for prompt in partial_rollouts if prompt in living]
        self.starting_point.partial_rollouts = parked
        self.starting_point.interrupted = list(living.values())

    def _group(self, row: GroupRow, members: Sequence[SampleRow]) -> Group:
        group = Group(
            self.prompt_of(row.prompt),
            row.num_required,
            [],
            num_launched=row.num_launched,
            attempt=row.attempt,
            round_drawn=row.round,
            deferrals=row.deferrals,
        )
        self.starting_point.rows[group] = row
        stored = {sample.number: sample for sample in members if sample.attempt == row.attempt}
        if not stored:  # this roll-back restarted the group
            ids = [SampleId(row.prompt, row.attempt, number) for number in range(row.num_launched)]
            group.samples = [Sample(id, group, seed=noise_seed(self.seed, id)) for id in ids]
            return group
        kept = msgspec.json.decode(row.kept, type=list[int])
        samples = {
            number: self._sample(sample, group)
            for number, sample in sorted(stored.items())
            if sample.fate is None or number in kept
        }
        group.samples = list(samples.values())
        group.kept = [samples[number] for number in kept]
        return group

    def _sample(self, row: SampleRow, group: Group) -> Sample:
        start = self.starting_point
        metrics, columns = msgspec.json.decode(row.reward_report)
        sample = Sample(
            row.id,
            group,
            seed=noise_seed(self.seed, row.id),
            finish_reason=row.finish_reason,
            turns=row.ended_turns,
            in_episode=row.in_episode,
            reference_logprobs=list(array("f", row.reference_logprobs)),
            text=row.text,
            reward=row.reward,
            reward_metrics=metrics,
            reward_columns=columns,
            failure=row.failure,
            fate=row.fate,
        )
        start.origins[sample] = row.origins
        for origin in row.origins:
            publication = (origin.life, origin.version)
            age = distance(self.books.lives, (start.life, start.version), publication)
            sample.grow(origin.num_tokens, start.version - age)
            if age != start.version - origin.version:
                start.dead.add(group)
        for tokens in self.books.tokens.get(row.id, ()):
            sample.completion_ids.extend(array("i", tokens.ids))
            sample.behavior_logprobs.extend(array("f", tokens.logprobs))
        return sample


_TOKEN_BYTES = 4


def read_books(store: Store, *, tokens: bool = True) -> Books:
    """Read the books of a run.

    Args:
        tokens: whether to read the tokens of the samples, which are most of the data.

    Raises:
        LedgerError: the store is damaged, or of another format.
    """
    runs = store.rows(RunRow)
    if len(runs) != 1 or runs[0].format != FORMAT:
        raise LedgerError(
            f"{store.name} holds no ledger that this version of tailrace reads (format {FORMAT}); resume "
            "with the version that wrote it, or begin a new run in another --output-dir"
        )
    books = Books(
        run=runs[0],
        lives={row.life: row for row in store.rows(LifeRow)},
        marks=store.rows(MarkRow),
        groups={row.prompt: row for row in store.rows(GroupRow)},
        samples={row.id: row for row in store.rows(SampleRow)},
        trainings={(row.life, row.id): row for row in store.rows(TrainingRow)},
    )
    for row in store.rows(TokensRow) if tokens else ():
        books.tokens.setdefault(SampleId(row.prompt, row.attempt, row.number), []).append(row)
    try:
        problem = next(_contradictions(books), None)
    except msgspec.DecodeError as why:
        problem = str(why)
    if problem:
        raise LedgerError(
            f"{store.name} is damaged ({problem}); put a copy back, or begin a new run in another "
            "--output-dir"
        )
    return books


def _contradictions(books: Books) -> Iterator[str]:
    """Yield what is wrong where the rows contradict one another."""
    if set(books.lives) != set(range(1, len(books.lives) + 1)):
        yield f"its lives are {sorted(books.lives)}"
    if len(books.groups) > books.run.num_drawn:
        yield f"{len(books.groups)} groups of {books.run.num_drawn} prompts"
    for id, sample in books.samples.items():
        if id.prompt not in books.groups:
            yield f"sample {id} has no group"
        if any(origin.life not in books.lives for origin in sample.origins):
            yield f"sample {id} belongs to a life that is not recorded"
        ends = [turn.num_tokens for turn in sample.ended_turns]
        if ends != sorted(ends) or max(ends, default=0) > sample.num_tokens:
            yield f"the turns of sample {id} end at {ends} of {sample.num_tokens} tokens"
    for training in books.trainings.values():
        if training.id not in books.samples:
            yield f"sample {training.id} was trained and is missing"
    for id, rows in books.tokens.items():
        num_stored = 0
        for row in rows:
            if row.start != num_stored or len(row.ids) != len(row.logprobs) or len(row.ids) % _TOKEN_BYTES:
                yield f"the tokens of sample {id} do not follow one another"
            num_stored += len(row.ids) // _TOKEN_BYTES
        num_tokens = books.samples[id].num_tokens if id in books.samples else 0
        if num_stored != num_tokens:
            yield f"sample {id} has {num_stored} tokens stored, and produced {num_tokens}"
