"""`tailrace inspect`: what a run's ledger says, of a run that goes on as of one that ended.

The balance: every prompt drawn and every token generated, by what became of them. With a prompt: the life of
its group, sample by sample.
"""

from contextlib import closing
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.config import RunConfig
from tailrace.errors import ConfigError
from tailrace.ledger.base import Books, GroupRow, LifeRow, Origin, SampleRow
from tailrace.ledger.open import open_store
from tailrace.ledger.read import read_books
from tailrace.ledger.recovery import held_tokens_of, totals_of
from tailrace.workers.counter import COUNTS_FOLDER, counted_tokens

OLDEST = 5


class Prompts(msgspec.Struct, frozen=True):
    """drawn = trained + filtered + dropped + living."""

    drawn: int
    trained: int
    filtered: int
    dropped: int
    living: int


class Tokens(msgspec.Struct, frozen=True):
    """generated = trained + held + wasted + evaluated + unwritten."""

    generated: int
    """By the engines' own count."""
    trained: int
    held: int
    """Of living groups."""
    wasted: dict[str, int]
    """By reason."""
    evaluated: int
    unwritten: int
    """On their way to the ledger; after a kill the next life counts them as the waste 'crash'."""
    trained_again: int
    """Trained by a life that went back behind it, and so once more."""


class Life(msgspec.Struct, frozen=True):
    life: int
    parent: int
    """The life whose checkpoint it began with; 0: none."""
    round: int
    version: int
    step: int
    """Where it began."""
    crash_tokens: int
    samples_undone: int
    """Trained in it, and undone by a later life."""


class Checkpoint(msgspec.Struct, frozen=True):
    name: str
    round: int
    version: int
    step: int


class LivingGroup(msgspec.Struct, frozen=True):
    prompt: int
    round: int
    """When it was drawn."""
    deferrals: int
    kept: int
    num_required: int
    tokens: int


class Balance(msgspec.Struct, frozen=True):
    """What became of everything."""

    prompts: Prompts
    tokens: Tokens
    lives: list[Life]
    checkpoints: list[Checkpoint]
    oldest: list[LivingGroup]
    """The living groups that were drawn first."""

    @classmethod
    def of(cls, books: Books, num_generated: int) -> "Balance":
        totals = totals_of(books)
        living = [group for group in books.groups.values() if group.fate is None]
        held = held_tokens_of(books)
        undone = [training for training in books.trainings.values() if training.undone is not None]
        return cls(
            Prompts(
                totals.num_drawn,
                totals.groups["trained"],
                totals.groups["filtered"],
                totals.groups["dropped"],
                len(living),
            ),
            Tokens(
                generated=num_generated,
                trained=totals.trained_tokens,
                held=held,
                wasted=dict(totals.wasted_tokens),
                evaluated=totals.evaluated_tokens,
                unwritten=num_generated - totals.num_known_tokens - held,
                trained_again=sum(books.samples[training.id].num_tokens for training in undone),
            ),
            [
                _life(life, sum(training.life == life.life for training in undone))
                for life in books.lives.values()
            ],
            [
                Checkpoint(mark.checkpoint, mark.round, mark.version, mark.step)
                for mark in books.marks
                if mark.undone is None
            ],
            [_living(books, group) for group in living[:OLDEST]],
        )


class SampleLife(msgspec.Struct, frozen=True):
    id: str
    spans: list[Origin]
    """Life and version that produced its tokens, and how many."""
    finish_reason: str | None
    reward: float | None
    failure: str | None
    fate: str | None
    steps: list[str]
    """The optimizer steps that trained it."""


class GroupLife(msgspec.Struct, frozen=True):
    """From draw to fate."""

    prompt: int
    life: int
    round: int
    """When it was drawn."""
    deferrals: int
    """How often it was parked."""
    attempts: int
    fate: str | None
    reason: str
    samples: list[SampleLife]

    @classmethod
    def of(cls, books: Books, prompt: int) -> "GroupLife":
        """
        Raises:
            ConfigError: the ledger has no such group.
        """
        if (group := books.groups.get(prompt)) is None:
            known = f"choose from 0 to {books.run.num_drawn - 1}" if books.groups else "none was drawn yet"
            raise ConfigError("--group", prompt, "the ledger has no such group", known)
        samples = [sample for sample in books.samples.values() if sample.prompt == prompt]
        return cls(
            prompt,
            group.life,
            group.round,
            group.deferrals,
            group.attempt + 1,
            group.fate,
            group.reason,
            [_sample(books, sample) for sample in samples],
        )


def inspect(config: RunConfig, folder: Path, *, prompt: int | None, as_json: bool) -> None:
    """Print what the ledger of the run in the folder says.

    Raises:
        ConfigError: the run has no ledger, or it has no such group.
        LedgerError: it is missing or damaged.
    """
    with closing(open_store(config.ledger, folder, only_read=True)) as store:
        books = read_books(store, tokens=False)
    found = (
        Balance.of(books, counted_tokens(folder / COUNTS_FOLDER))
        if prompt is None
        else GroupLife.of(books, prompt)
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = Console()
    for table in _balance_tables(found) if isinstance(found, Balance) else [_group_table(found)]:
        if not console.is_terminal:
            table.box = None
        console.print(table)


def _life(row: LifeRow, undone: int) -> Life:
    return Life(row.life, row.parent, row.round, row.version, row.step, row.crash_tokens, undone)


def _living(books: Books, group: GroupRow) -> LivingGroup:
    tokens = sum(
        sample.num_tokens
        for sample in books.samples.values()
        if sample.prompt == group.prompt and sample.fate is None
    )
    kept = len(msgspec.json.decode(group.kept, type=list[int]))
    return LivingGroup(group.prompt, group.round, group.deferrals, kept, group.num_required, tokens)


def _sample(books: Books, row: SampleRow) -> SampleLife:
    trainings = [training for training in books.trainings.values() if training.id == row.id]
    steps = [
        f"{training.step} in life {training.life}"
        + (f", undone by life {training.undone}" if training.undone else "")
        for training in trainings
    ]
    return SampleLife(str(row.id), row.origins, row.finish_reason, row.reward, row.failure, row.fate, steps)


def _balance_tables(balance: Balance) -> list[Table]:
    prompts, tokens = balance.prompts, balance.tokens
    sums = Table("", "prompts", "tokens", title="the balance", title_justify="left")
    sums.add_row("drawn, generated", f"{prompts.drawn:,}", f"{tokens.generated:,}")
    sums.add_row("= trained", f"{prompts.trained:,}", f"{tokens.trained:,}")
    sums.add_row("+ living, held", f"{prompts.living:,}", f"{tokens.held:,}")
    sums.add_row("+ filtered", f"{prompts.filtered:,}", "")
    sums.add_row("+ dropped", f"{prompts.dropped:,}", "")
    for reason, wasted in tokens.wasted.items():
        sums.add_row(f"+ wasted: {reason}", "", f"{wasted:,}")
    sums.add_row("+ evaluated", "", f"{tokens.evaluated:,}")
    sums.add_row("+ not yet written", "", f"{tokens.unwritten:,}")
    sums.caption = f"{tokens.trained_again:,} tokens were trained once more after a kill"
    lives = Table("life", "began with", "round", "version", "step", "lost in the kill before", "undone later")
    for life in balance.lives:
        began = f"a checkpoint of life {life.parent}" if life.parent else "the config's weights"
        numbers = (life.round, life.version, life.step, life.crash_tokens, life.samples_undone)
        lives.add_row(str(life.life), began, *(f"{number:,}" for number in numbers))
    oldest = Table("prompt", "drawn in round", "parked", "finished", "tokens", title="oldest living groups")
    for group in balance.oldest:
        finished = f"{group.kept} of {group.num_required}"
        drawn = (str(group.prompt), str(group.round), str(group.deferrals))
        oldest.add_row(*drawn, finished, f"{group.tokens:,}")
    return [sums, lives, *([oldest] if balance.oldest else [])]


def _group_table(group: GroupLife) -> Table:
    table = Table("sample", "tokens by life and version", "ended", "reward", "fate", "steps")
    table.title = (
        f"prompt {group.prompt}: drawn in round {group.round} of life {group.life}, parked {group.deferrals} "
        f"times, {group.attempts} attempts; {group.reason or group.fate or 'alive'}"
    )
    table.title_justify = "left"
    for sample in group.samples:
        spans = " + ".join(f"{span.num_tokens} by {span.life}.{span.version}" for span in sample.spans)
        reward = sample.failure or ("" if sample.reward is None else f"{sample.reward:g}")
        fate = sample.fate or "alive"
        table.add_row(sample.id, spans, sample.finish_reason or "", reward, fate, "; ".join(sample.steps))
    return table
