"""Recovers the state of a run from its ledger: where the next life begins, and with which groups.

The base is the newest committed checkpoint that exists. Trainings after the base went into weights that
are lost: they are undone, and their groups are restored with their tokens. Samples and groups that
were filtered, dropped or wasted keep their fate. Groups that were parked at the base are parked again. The
other groups without a fate come first when the schedule asks for prompts.

The staleness of a restored token is counted along the tree of lives (`ledger/base.py`). A schedule that
declares a bound restarts groups with tokens of a dead branch, because their staleness could exceed the bound.
Without a bound they are continued, or trained as they are.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from tailrace.errors import BadRow, LedgerError
from tailrace.ledger.base import (
    FORMAT,
    CheckpointRow,
    GroupRow,
    LedgerRow,
    LedgerTables,
    LifeRow,
    Origin,
    RunRow,
    SampleRow,
    Transaction,
    distance,
)
from tailrace.ledger.ledger import Totals
from tailrace.types import Group, Prompt, Sample, SampleId, noise_seed


@dataclass(slots=True)
class StartingPoint:
    """The state with which a life begins. The defaults are those of a new run."""

    run: RunRow = field(default_factory=lambda: RunRow(FORMAT, 0, 0))
    life: int = 1
    base: CheckpointRow = field(default_factory=lambda: CheckpointRow(1, 0, 0, 0, "", []))
    """Checkpoint at which this process begins. Without one: with the model of the config."""
    num_generated: int = 0
    """Tokens produced by the engines of all earlier lives, by their own count."""
    totals: Totals = field(default_factory=Totals)
    partial_rollouts: list[Group] = field(default_factory=list)
    """Groups that were parked at the base, in their order."""
    interrupted: list[Group] = field(default_factory=list)
    """All other groups without a fate, in the order drawn. One that begins anew has no samples yet."""
    group_rows: dict[Group, GroupRow] = field(default_factory=dict)
    """Stored row of each group without a fate."""
    dead: set[Group] = field(default_factory=set)
    """Groups without a fate that have tokens of a dead branch (ledger/base.py)."""
    origins: dict[Sample, list[Origin]] = field(default_factory=dict)
    """Origins of the tokens of each sample without a fate."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward of each prompt that was trained or filtered."""
    missing: list[CheckpointRow] = field(default_factory=list)
    """The rows after the base, whose checkpoints were removed."""
    best: tuple[float, int] | None = None
    """Held-out reward and round of the best evaluation that has a checkpoint; None: there is none."""
    born: LifeRow = field(default_factory=lambda: LifeRow(1, 0, 0, 0, 0, 0))
    """The row of this life."""
    began_s: float | None = None
    """Time on the run's clock at which its devices were taken; None: when the run began."""
    steps_per_round: int | None = None
    """Optimizer steps of a round that is not interrupted; None: unknown."""
    opening: Transaction = field(default_factory=lambda: Transaction([]))
    """The rows to commit when the life begins. Until then the store is unchanged."""


def first_life(config: str = "{}", inputs: Mapping[str, str] | None = None) -> StartingPoint:
    """Return the state with which a new run begins. `config`: the resolved config, as JSON. `inputs`: as
    LifeRow.inputs."""
    run = RunRow(FORMAT, 0, 0)
    born = LifeRow(1, 0, 0, 0, 0, 0, config, inputs=dict(inputs or {}))
    return StartingPoint(run, born=born, opening=Transaction([run, born]))


def next_life(
    tables: LedgerTables,
    *,
    config: str = "{}",
    inputs: Mapping[str, str] | None = None,
    checkpoints: Path,
    num_generated: int,
    prompt_of: Callable[[int], Prompt],
    seed: int,
) -> StartingPoint:
    """Return the state with which a resumed run begins. The store changes only when `opening` is committed.
    Raises a LedgerError if the ledger knows more tokens than the engines produced.

    Args:
        config: the resolved config of the new life, as JSON, checked with `config.check_resumable`.
        inputs: of the new life (LifeRow.inputs).
        checkpoints: folder of the checkpoints; the row of one that was removed is ignored.
        num_generated: tokens produced by the engines of all lives, by their own count.
    """
    life = max(tables.lives) + 1
    base = _base(tables, checkpoints)
    later = [row for row in tables.checkpoints if row.undone is None and _place(row) > _place(base)]
    rows: list[LedgerRow] = [replace(row, undone=life) for row in later]
    rows += _roll_back(tables, base, life)
    prompt_of = cache(prompt_of)
    rows += _drop_without_prompt(tables, prompt_of)
    known = totals_of(tables).num_known_tokens + tables.held_tokens + tables.drafted_tokens
    if known > num_generated:
        raise LedgerError(
            f"{tables.store} knows of {known} tokens and the engines counted {num_generated}: the counts "
            "beside it are missing or older; restore the whole output directory, or begin a new run in "
            "another one"
        )
    crash_tokens, last = num_generated - known, tables.lives[life - 1]
    used = last.seconds, last.prefilled_tokens
    place = base.round, base.version, base.step
    born = LifeRow(life, base.life, *place, crash_tokens, config, *used, inputs=dict(inputs or {}))
    tables.lives[life] = born
    starting_point = StartingPoint(
        tables.run,
        life=life,
        base=base,
        num_generated=num_generated,
        totals=totals_of(tables),
        rewards=_rewards_of(tables),
        missing=later,
        born=born,
        opening=Transaction([*rows, born]),
    )
    _Restoration(starting_point, tables, prompt_of, seed).restore()
    return starting_point


def totals_of(tables: LedgerTables) -> Totals:
    """Return the sums over all samples and groups with a fate."""
    totals, last = Totals(tables.run.num_drawn), tables.lives[max(tables.lives)]
    totals.evaluated_tokens = tables.run.evaluated_tokens
    totals.seconds, totals.prefilled_tokens = last.seconds, last.prefilled_tokens
    for training in tables.trainings.values():
        if training.undone is None:
            totals.masked_tokens += training.masked
            totals.trained_tokens -= training.masked
        else:
            totals.undone_tokens += tables.samples[training.id].num_tokens
    for sample in tables.samples.values():
        if sample.fate == "trained":
            totals.trained_tokens += sample.num_tokens
        elif sample.fate is not None:
            totals.wasted_tokens[sample.fate] += sample.num_tokens
    crash = sum(life.crash_tokens for life in tables.lives.values())
    totals.wasted_tokens.update({"crash": crash} if crash else {})
    totals.groups.update(group.fate for group in tables.groups.values() if group.fate is not None)
    skipped = tables.run.num_drawn - len(tables.groups)  # unusable rows have no group
    totals.groups.update({"dropped": skipped} if skipped else {})
    return totals


def _rewards_of(tables: LedgerTables) -> dict[int, float]:
    """Return the mean reward of the kept samples of each prompt that was trained or filtered."""
    found: dict[int, float] = {}
    for prompt, members in tables.members().items():
        group = tables.groups[prompt]
        newest = {each.number: each.reward for each in sorted(members, key=lambda each: each.attempt)}
        rewards = [reward for number in group.kept if (reward := newest.get(number)) is not None]
        if group.fate in ("trained", "filtered") and rewards:
            found[prompt] = fmean(rewards)
    return found


def _base(tables: LedgerTables, checkpoints: Path) -> CheckpointRow:
    there = [
        row for row in tables.checkpoints if row.undone is None and (checkpoints / row.checkpoint).is_dir()
    ]
    return max(there, key=_place, default=CheckpointRow(1, 0, 0, 0, "", []))


def _place(row: CheckpointRow) -> tuple[int, int]:
    """Return the place of a checkpoint in the run. Of two in a round the one with more steps is newer."""
    return row.round, row.step


def _roll_back(tables: LedgerTables, base: CheckpointRow, life: int) -> list[LedgerRow]:
    """Undo in the tables what came after the base. Return the rows that changed."""
    undone = {
        key: replace(training, undone=life)
        for key, training in tables.trainings.items()
        if training.undone is None and training.step > base.step
    }
    tables.trainings |= undone
    alive = {training.id for training in undone.values()}
    changed: list[LedgerRow] = [*undone.values()]
    for prompt, members in tables.members().items():
        group, samples = _rolled_back(tables.groups[prompt], members, alive)
        changed += [group] if group != tables.groups[prompt] else []
        changed += [sample for sample in samples if sample != tables.samples[sample.id]]
        tables.groups[prompt] = group
        tables.samples.update((sample.id, sample) for sample in samples)
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
        attempt = 1 + max(sample.attempt for sample in members)
        group = replace(group, fate=None, reason="", attempt=attempt, kept=[])
        fate = "pruned"
    else:
        group = replace(group, fate=None, reason="")
        fates = "interrupted", None  # the abort of a sample of an earlier attempt was under way
        return group, [replace(each, fate=fates[each.attempt >= group.attempt]) for each in living]
    return group, [replace(sample, fate=fate) for sample in living]


def _drop_without_prompt(tables: LedgerTables, prompt_of: Callable[[int], Prompt]) -> list[LedgerRow]:
    """Drop in the tables the groups without a fate whose prompt cannot be used, now that prompts are checked.
    Return the rows that changed."""
    changed: list[LedgerRow] = []
    members = tables.members()
    for group in [group for group in tables.groups.values() if group.fate is None]:
        try:
            reason = "" if prompt_of(group.prompt).ids else "empty prompt"
        except BadRow as bad:
            reason = bad.reason
        if reason:
            tables.groups[group.prompt] = replace(group, fate="dropped", reason=reason)
            lost = [replace(each, fate=reason) for each in members[group.prompt] if each.fate is None]
            tables.samples.update((sample.id, sample) for sample in lost)
            changed += [tables.groups[group.prompt], *lost]
    return changed


@dataclass(frozen=True, slots=True)
class _Restoration:
    """Restores the groups without a fate into a starting point."""

    start: StartingPoint
    tables: LedgerTables
    prompt_of: Callable[[int], Prompt]
    seed: int

    def restore(self) -> None:
        """Restore each group: parked, or among the interrupted ones in the order drawn."""
        members, groups = self.tables.members(), self.tables.groups.values()
        alive = {row.prompt: self._group(row, members[row.prompt]) for row in groups if row.fate is None}
        parked = [prompt for prompt in self.start.base.partial_rollouts if prompt in alive]
        self.start.partial_rollouts = [alive.pop(prompt) for prompt in parked]
        self.start.interrupted = list(alive.values())

    def _group(self, row: GroupRow, members: Sequence[SampleRow]) -> Group:
        group = Group(
            self.prompt_of(row.prompt),
            row.num_required,
            [],
            num_launched=row.num_launched,
            attempt=row.attempt,
            last_attempt=max([row.attempt, *(sample.attempt for sample in members)]),
            round_drawn=row.round,
            deferrals=row.deferrals,
        )
        self.start.group_rows[group] = row
        # Of members with one number the last one: the others lost their version.
        stored = {sample.number: sample for sample in members if sample.attempt >= row.attempt}
        group.num_replaced = max([row.num_launched - 1, *stored]) - row.num_launched + 1
        samples = {
            number: self._sample(sample, group)
            for number, sample in sorted(stored.items())
            if sample.fate is None or number in row.kept
        }
        group.samples = list(samples.values())
        group.kept = [samples[number] for number in row.kept]
        return group

    def _sample(self, row: SampleRow, group: Group) -> Sample:
        sample = stored_sample(self.tables, row, group, self.seed)
        self.start.origins[sample] = row.spans
        if changed := self.tables.samples.get(SampleId(row.prompt, -1 - row.attempt, row.number)):
            sample.num_changed = changed.num_tokens
        version = self.start.base.version
        for span in row.spans:
            age = distance(self.tables.lives, (self.start.life, version), (span.life, span.version))
            sample.grow(span.num_tokens, version - age)
            if age != version - span.version:
                self.start.dead.add(group)
        return sample


def stored_sample(tables: LedgerTables, row: SampleRow, group: Group, seed: int) -> Sample:
    """Return a sample with its stored tokens, without the versions that generated them (`Sample.grow`)."""
    stored = tables.tokens.get(row.id, ())
    return Sample(
        row.id,
        group,
        seed=noise_seed(seed, row.id),
        finish_reason=row.finish_reason,
        turns=row.turns,
        in_episode=row.in_episode,
        completion_ids=[id for tokens in stored for id in array("i", tokens.ids)],
        behavior_logprobs=[logprob for tokens in stored for logprob in array("f", tokens.logprobs)],
        reference_logprobs=list(array("f", row.reference_logprobs)),
        text=row.text,
        reward=row.reward,
        reward_metrics=row.reward_report[0],
        reward_columns=row.reward_report[1],
        failure=row.failure,
        fate=row.fate,
    )
