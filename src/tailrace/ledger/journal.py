"""Writes the ledger to a store while the run goes on, off the critical path.

Groups and samples hold the state of the run. At intervals, between two events of the loop, the journal
compares them with what it wrote last. The rows that differ are the whole run's changes until one instant: a
transaction. Transactions are committed in order, one at a time. While one is committed the next one grows.

The row of a checkpoint is committed when its files are complete; a checkpoint without a row is ignored. So
the weights of a checkpoint and the ledger agree after a kill at any moment.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy

import msgspec
from typing_extensions import override

from tailrace.clock import now, waiting
from tailrace.contracts.engine import Arrival
from tailrace.ledger.base import (
    DRAFTED,
    CheckpointRow,
    GroupRow,
    LedgerRow,
    Origin,
    ProbeRow,
    SampleRow,
    TokensRow,
    TrainingRow,
    Transaction,
)
from tailrace.ledger.ledger import Ledger, NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.ledger.store import Store
from tailrace.types import Group, Sample, SampleId

MIN_PAUSE_RATIO, NOW_PAUSE_RATIO = 50, 10
"""After a scan of all groups the journal pauses at least this many times as long as the scan took; the second
where someone waits for what is written."""

_SampleState = tuple[int, *tuple[object, ...]]

StartCommit = Callable[[Transaction], asyncio.Future[None]]
"""Starts a commit. The future fails with the LedgerError of the store."""


@contextmanager
def commits_on_thread(store: Store) -> Iterator[StartCommit]:
    """Commit on a thread, so that the controller does not wait for a disk or a network. The end of the block
    waits for the commits that were started."""
    with ThreadPoolExecutor(1, thread_name_prefix="ledger") as thread:
        yield lambda rows: asyncio.get_running_loop().run_in_executor(thread, store.commit, rows)


class Journal(NullJournal):
    """Writes the ledger of one life.

    Its coroutines raise the LedgerError of a store that cannot be written.
    """

    def __init__(self, start_commit: StartCommit, starting_point: StartingPoint, *, flush_s: float) -> None:
        """
        Args:
            starting_point: what the store holds already.
            flush_s: least seconds between two commits.
        """
        self._start_commit, self._flush_s = start_commit, flush_s
        self._life = starting_point.life
        self._run, self._born = starting_point.run, starting_point.born
        self._origins = starting_point.origins
        self._groups = starting_point.group_rows
        """Stored row of each group without a fate."""
        self._samples = {sample: _state_of(sample) for sample in starting_point.origins}
        """Stored state of each sample without a fate."""
        self._checkpoints = [starting_point.base] if starting_point.base.checkpoint else []
        """Rows of the last two checkpoints."""
        self._ended: list[tuple[Group, str]] = []
        self._finalized: list[tuple[Sample, int | None]] = []
        self._rows: list[LedgerRow] = []
        self._pruned: list[SampleId] = []
        self._verified: dict[Sample, None] = {}  # since the last scan
        self._rewritten: list[SampleId] = []
        self._covered_step = self._num_probes = 0
        self._commit: asyncio.Future[None] | None = None
        self._flush: asyncio.Task[None] | None = None  # it has not yet looked for changes
        self._scan_s = 0.0  # how long the last scan of all groups took

    @override
    def follow(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @override
    def finalize(self, sample: Sample, step: int | None) -> None:
        self._finalized.append((sample, step))

    @override
    def rewrite(self, sample: Sample) -> None:
        self._verified[sample] = None

    @override
    def end(self, group: Group, reason: str) -> None:
        self._ended.append((group, reason))

    @override
    def probe(self, engine: str, arrival: Arrival) -> None:
        self._num_probes += 1
        place = (self._life, engine, self._num_probes, arrival.version)
        measured = (arrival.difference, arrival.cache_difference, arrival.limit)
        self._rows.append(ProbeRow(*place, *measured, arrival.cause))

    @override
    async def commit_checkpoint(self, row: CheckpointRow) -> None:
        self._collect_changes()
        self._rows.append(row)
        self._prune(row)
        await self._put_and_wait()

    @override
    async def keep(self) -> None:
        pause_s = self._flush_s
        while True:
            await asyncio.sleep(pause_s)
            if self._idle():
                self._put_changes()
                pause_s = max(self._flush_s, MIN_PAUSE_RATIO * self._scan_s)

    @override
    async def written(self) -> None:
        if self._flush is None:
            self._flush = asyncio.create_task(self._write_now())
        with waiting("the ledger to be written"):
            await asyncio.shield(self._flush)

    async def _write_now(self) -> None:
        await asyncio.sleep(NOW_PAUSE_RATIO * self._scan_s)
        try:
            await self._last_commit()
        finally:
            self._flush = None
        self._put_changes()
        await self._last_commit()

    @override
    async def finish(self) -> None:
        self._collect_changes()
        await self._put_and_wait()

    def _idle(self) -> bool:
        """Return whether no commit is under way. Raises the error of the last commit."""
        if self._commit and self._commit.done():
            self._commit.result()
        return self._commit is None or self._commit.done()

    def _put_changes(self) -> None:
        began_s = now()
        self._collect_changes()
        self._scan_s = now() - began_s
        self._put()

    def _put(self) -> None:
        if self._rows or self._pruned:
            changes = Transaction(self._rows, self._pruned, self._covered_step, self._rewritten)
            self._commit = self._start_commit(changes)
            self._commit.add_done_callback(_retrieve_error)
            self._rows, self._pruned, self._covered_step, self._rewritten = [], [], 0, []

    async def _put_and_wait(self) -> None:
        with waiting("the ledger to be written"):
            await self._last_commit()
            self._put()
            await self._last_commit()

    async def _last_commit(self) -> None:
        """Wait for the commit under way. Unlike `await self._commit`, a cancellation does not cancel it."""
        while self._commit and not self._idle():
            await asyncio.wait([self._commit])

    def _rewrite_verified(self) -> None:
        """Write all tokens of verified samples again, and count those that they lost."""
        verified, self._verified = self._verified, {}
        ids = {sample.id for sample in verified}
        self._rewritten += ids
        self._rows = [row for row in self._rows if not (isinstance(row, TokensRow) and row.id in ids)]
        for sample in verified:
            self._samples.pop(sample, None)
            self._origins.pop(sample, None)
            if sample.num_changed:
                self._rows.append(SampleRow.changed(sample.id, Origin(self._life, 0, sample.num_changed)))
            if sample.fate is None:  # its group may have discarded it, while its engine does not know yet
                self._rows += self._sample_rows(sample)
                self._samples[sample] = _state_of(sample)

    def _collect_changes(self) -> None:
        if self._verified:
            self._rewrite_verified()
        totals = self._ledger.totals
        run = msgspec.structs.replace(
            self._run, num_drawn=totals.num_drawn, evaluated_tokens=totals.evaluated_tokens
        )
        if run != self._run:
            self._rows.append(run)
            self._run = run
        self._ledger.measure()
        used = {"seconds": totals.seconds, "prefilled_tokens": totals.prefilled_tokens}
        born = msgspec.structs.replace(self._born, **used)
        if born != self._born:
            self._rows.append(born)
            self._born = born
        for group in self._ledger.active.values():
            self._collect_group(group, DRAFTED if group.is_drafted else "")
            for sample in group.samples:
                if sample.fate is None and self._samples.get(sample) != (state := _state_of(sample)):
                    self._rows += self._sample_rows(sample)
                    self._samples[sample] = state
        for group, reason in self._ended:
            self._collect_group(group, reason)
            del self._groups[group]
        for sample, step in self._finalized:
            self._collect_finalized(sample, step)
        self._ended, self._finalized = [], []

    def _collect_group(self, group: Group, reason: str) -> None:
        old = self._groups.get(group)
        row = GroupRow(
            prompt=group.prompt.index,
            life=old.life if old else self._life,
            round=group.round_drawn,
            num_required=group.num_required,
            num_launched=group.num_launched,
            attempt=group.attempt,
            deferrals=group.deferrals,
            kept=[sample.id.number for sample in group.kept],
            fate=group.fate,
            reason=reason,
        )
        if row != old:
            self._groups[group] = row
            self._rows.append(row)

    def _collect_finalized(self, sample: Sample, step: int | None) -> None:
        if step is None:
            self._rows.append(self._sample_row(sample).without_tokens)
            if self._num_stored(sample):
                self._pruned.append(sample.id)
        else:
            self._rows += self._sample_rows(sample)
            self._rows.append(TrainingRow(self._life, *sample.id, step, sample.num_masked))
        self._samples.pop(sample, None)
        self._origins.pop(sample, None)

    def _sample_rows(self, sample: Sample) -> Iterator[LedgerRow]:
        """Yield the row of the sample, and a row of the tokens gained since the last one."""
        yield self._sample_row(sample)
        start = self._num_stored(sample)
        if ids := sample.completion_ids[start:]:
            logprobs = array("f", sample.behavior_logprobs[start:])
            yield TokensRow(*sample.id, start, array("i", ids).tobytes(), logprobs.tobytes())

    def _num_stored(self, sample: Sample) -> int:
        """Return how many tokens of a sample are in rows already."""
        return self._samples[sample][0] if sample in self._samples else 0

    def _sample_row(self, sample: Sample) -> SampleRow:
        return SampleRow(
            *sample.id,
            spans=self._spans(sample),
            finish_reason=sample.finish_reason,
            text=sample.text,
            reward=sample.reward,
            failure=sample.failure,
            fate=sample.fate,
            reference_logprobs=array("f", sample.reference_logprobs).tobytes(),
            reward_report=(dict(sample.reward_metrics), dict(sample.reward_columns)),
            turns=deepcopy(sample.turns),
            in_episode=sample.in_episode,
        )

    def _spans(self, sample: Sample) -> list[Origin]:
        """Return the origins of the sample's tokens: those of earlier lives, then those of this life."""
        origins = list(self._origins.get(sample, ()))
        known = sum(origin.num_tokens for origin in origins)
        for span in sample.spans:
            known -= span.num_tokens
            if known < 0:
                origins.append(Origin(self._life, span.version, min(-known, span.num_tokens)))
        return origins

    def _prune(self, newest: CheckpointRow) -> None:
        """Remove data that only older checkpoints need. The last but one serves if the newest is damaged."""
        rows = [*self._checkpoints, newest]
        for old in rows[:-2]:
            self._rows.append(msgspec.structs.replace(old, longest={}, steps_at={}, anchors={}))
        for last in () if self.keep_tokens else rows[-2:-1]:
            self._covered_step = last.step
        self._checkpoints = rows[-2:]


def _state_of(sample: Sample) -> _SampleState:
    """Return the fields of a sample whose change makes it due to be written."""
    turns = tuple(
        (len(turn.observation_ids), len(turn.results), turn.results.count(None)) for turn in sample.turns
    )
    state = (sample.num_tokens, sample.finish_reason, sample.reward, sample.failure)
    return (*state, sample.in_episode, turns, tuple(sample.spans))  # a server may correct the spans later


def _retrieve_error(commit: asyncio.Future[None]) -> None:
    """Mark the error of a commit as retrieved, so that asyncio does not log it when the run ends first."""
    if not commit.cancelled():
        commit.exception()
