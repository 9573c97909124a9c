"""`tailrace inspect`: what the ledger of a run says, also while the run goes on.

The balance: how many prompts and tokens had each fate. With a prompt: its group, sample by sample.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from rich.table import Table

from tailrace.assembly.folder import RunFolder
from tailrace.commands.tables import open_console
from tailrace.config import RunConfig
from tailrace.engine.base import COUNTS_FOLDER, counted_tokens
from tailrace.errors import ConfigError
from tailrace.ledger.base import GroupRow, LedgerTables, LifeRow, Origin, SampleRow
from tailrace.ledger.recovery import read_ledger, totals_of
from tailrace.ledger.store import open_store
from tailrace.types import Turn

NUM_OLDEST = 5


class Prompts(msgspec.Struct):
    """drawn = trained + filtered + dropped + living."""

    drawn: int
    trained: int
    filtered: int
    dropped: int
    living: int


class Tokens(msgspec.Struct):
    """generated = trained + held + the sum of wasted + evaluated + unwritten."""

    generated: int
    """By the engines' own count."""
    trained: int
    held: int
    """Tokens of samples without a fate."""
    wasted: dict[str, int]
    """Tokens by reason."""
    evaluated: int
    unwritten: int
    """Tokens that the ledger does not hold yet. After a kill the next life wastes them as "crash"."""
    trained_again: int
    """Tokens whose training was undone by a resumption."""


class Life(msgspec.Struct):
    """A life, and the state of the run with which it began (parent 0: without a checkpoint)."""

    life: int
    parent: int
    round: int
    version: int
    step: int
    crash_tokens: int
    samples_undone: int
    """Samples that it trained and that a later life undid."""


class Checkpoint(msgspec.Struct):
    name: str
    round: int
    version: int
    step: int


class LivingGroup(msgspec.Struct):
    """A group without a fate, and the round in which it was drawn."""

    prompt: int
    round: int
    deferrals: int
    kept: int
    num_required: int
    tokens: int


class Balance(msgspec.Struct):
    prompts: Prompts
    tokens: Tokens
    lives: list[Life]
    checkpoints: list[Checkpoint]
    oldest: list[LivingGroup]
    """The living groups that were drawn first."""


class SampleLife(msgspec.Struct):
    id: str
    spans: list[Origin]
    finish_reason: str | None
    reward: float | None
    failure: str | None
    fate: str | None
    steps: list[str]
    """The optimizer steps that trained it."""
    turns: list[Turn]
    """The turns of its episode that have ended; none once its tokens are removed."""


class GroupLife(msgspec.Struct):
    """A group, and the life and the round in which it was drawn."""

    prompt: int
    life: int
    round: int
    deferrals: int
    attempts: int
    fate: str | None
    reason: str
    samples: list[SampleLife]


def run(path: Path, overrides: Mapping[str, str], *, prompt: int | None, as_json: bool) -> None:
    """Inspect the run in an output directory. Raises as `inspect`, and ConfigError if there is none."""
    folder = RunFolder(path)
    folder.require_run()
    inspect(folder.read_config(overrides), path, prompt=prompt, as_json=as_json)


def inspect(config: RunConfig, folder: Path, *, prompt: int | None, as_json: bool) -> None:
    """Print what the ledger of the run in the folder says.

    Args:
        prompt: index of the prompt whose group is printed; None: the balance of the run.

    Raises:
        ConfigError: the run has no ledger, or it has no such group.
        LedgerError: it is missing or damaged.
    """
    with closing(open_store(config.ledger, folder, only_read=True)) as store:
        tables = read_ledger(store, tokens=False)
    num_generated = counted_tokens(folder / COUNTS_FOLDER)
    found = _balance(tables, num_generated) if prompt is None else _group(tables, prompt)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = open_console()
    for table in _balance_tables(found) if isinstance(found, Balance) else [_group_table(found)]:
        if not console.is_terminal:
            table.box = None
        console.print(table)


def _balance(tables: LedgerTables, num_generated: int) -> Balance:
    totals, held = totals_of(tables), tables.held_tokens
    living = [group for group in tables.groups.values() if group.fate is None]
    undone = [training for training in tables.trainings.values() if training.undone is not None]
    groups = totals.groups
    return Balance(
        Prompts(totals.num_drawn, groups["trained"], groups["filtered"], groups["dropped"], len(living)),
        Tokens(
            generated=num_generated,
            trained=totals.trained_tokens,
            held=held,
            wasted=dict(totals.wasted_tokens),
            evaluated=totals.evaluated_tokens,
            unwritten=num_generated - totals.num_known_tokens - held,
            trained_again=sum(tables.samples[training.id].num_tokens for training in undone),
        ),
        [_life(row, sum(training.life == row.life for training in undone)) for row in tables.lives.values()],
        [
            Checkpoint(mark.checkpoint, mark.round, mark.version, mark.step)
            for mark in tables.marks
            if mark.undone is None
        ],
        [_living(tables, group) for group in living[:NUM_OLDEST]],
    )


def _life(row: LifeRow, undone: int) -> Life:
    return Life(row.life, row.parent, row.round, row.version, row.step, row.crash_tokens, undone)


def _living(tables: LedgerTables, row: GroupRow) -> LivingGroup:
    samples = [sample for sample in tables.samples.values() if sample.prompt == row.prompt]
    tokens = sum(sample.num_tokens for sample in samples if sample.fate is None)
    kept = len(row.kept)
    return LivingGroup(row.prompt, row.round, row.deferrals, kept, row.num_required, tokens)


def _group(tables: LedgerTables, prompt: int) -> GroupLife:
    if (row := tables.groups.get(prompt)) is None:
        known = f"choose from 0 to {tables.run.num_drawn - 1}" if tables.groups else "none was drawn yet"
        raise ConfigError("--group", prompt, "the ledger has no such group", known)
    samples = [_sample(tables, sample) for sample in tables.samples.values() if sample.prompt == prompt]
    return GroupLife(
        prompt, row.life, row.round, row.deferrals, row.attempt + 1, row.fate, row.reason, samples
    )


def _sample(tables: LedgerTables, row: SampleRow) -> SampleLife:
    steps = [
        f"{training.step} in life {training.life}"
        + (f", undone by life {training.undone}" if training.undone else "")
        for training in tables.trainings.values()
        if training.id == row.id
    ]
    ended = None if row.in_episode else row.finish_reason
    turns = row.turns
    return SampleLife(str(row.id), row.spans, ended, row.reward, row.failure, row.fate, steps, turns)


def _balance_tables(balance: Balance) -> list[Table]:
    prompts, tokens = balance.prompts, balance.tokens
    sums = Table("", "prompts", "tokens", title="the balance", title_justify="left")
    for label, num_prompts, num_tokens in (
        ("drawn, generated", prompts.drawn, tokens.generated),
        ("= trained", prompts.trained, tokens.trained),
        ("+ living, held", prompts.living, tokens.held),
        ("+ filtered", prompts.filtered, None),
        ("+ dropped", prompts.dropped, None),
        *((f"+ wasted: {reason}", None, wasted) for reason, wasted in tokens.wasted.items()),
        ("+ evaluated", None, tokens.evaluated),
        ("+ not yet written", None, tokens.unwritten),
    ):
        sums.add_row(label, _number(num_prompts), _number(num_tokens))
    sums.caption = f"{tokens.trained_again:,} tokens were trained once more after a kill"
    lives = Table("life", "began with", "round", "version", "step", "lost in the kill before", "undone later")
    for life in balance.lives:
        began = f"a checkpoint of life {life.parent}" if life.parent else "the config's weights"
        numbers = (life.round, life.version, life.step, life.crash_tokens, life.samples_undone)
        lives.add_row(str(life.life), began, *map(_number, numbers))
    oldest = Table("prompt", "drawn in round", "parked", "finished", "tokens", title="oldest living groups")
    for group in balance.oldest:
        finished = f"{group.kept} of {group.num_required}"
        drawn = (str(group.prompt), str(group.round), str(group.deferrals))
        oldest.add_row(*drawn, finished, f"{group.tokens:,}")
    return [sums, lives, *([oldest] if balance.oldest else [])]


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _group_table(group: GroupLife) -> Table:
    table = Table("sample", "tokens by life and version", "ended", "reward", "fate", "steps")
    if any(sample.turns for sample in group.samples):
        table.add_column("turns: tokens (environment's, calls; *: a branch follows)")
    table.title = (
        f"prompt {group.prompt}: drawn in round {group.round} of life {group.life}, parked {group.deferrals} "
        f"times, {group.attempts} attempts; {group.reason or group.fate or 'alive'}"
    )
    table.title_justify = "left"
    for sample in group.samples:
        spans = " + ".join(f"{span.num_tokens} by {span.life}.{span.version}" for span in sample.spans)
        reward = sample.failure or ("" if sample.reward is None else f"{sample.reward:g}")
        fate = sample.fate or "alive"
        known = (sample.id, spans, sample.finish_reason or "", reward, fate, "; ".join(sample.steps))
        table.add_row(*known, *([_turns(sample.turns)] if len(table.columns) > len(known) else []))
    return table


def _turns(turns: Sequence[Turn]) -> str:
    starts = [0, *(turn.num_tokens for turn in turns)]
    return ", ".join(
        f"{turn.num_tokens - start} ({len(turn.observation_ids)}, {len(turn.results)})"
        + ("*" if turn.begins_branch else "")
        for start, turn in zip(starts, turns, strict=False)
    )
