"""Journal: writes a ledger down as it changes, off the critical path.

All truth is in the groups and samples, so the journal looks at them from time to time, between two events of
the loop, and puts down what is other than the last time: a cut through the whole run at one instant. Parking,
restarting, growing and finishing need no code of their own. The writer commits cuts whole and in their order,
one at a time; while it is busy the next one waits, and gets larger.

A mark is a cut that says: up to here, this checkpoint. It is committed after the checkpoint is whole, and a
checkpoint without a mark does not count; so what the weights contain and what the ledger says of them agree
after a kill at any moment.
"""

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tailrace.clock import now, waiting
from tailrace.ledger.base import (
    Cut,
    GroupRow,
    MarkRow,
    Origin,
    Row,
    SampleRow,
    TokensRow,
    TrainingRow,
)
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.past import Past
from tailrace.ledger.writer import Writer
from tailrace.types import Group, Sample, SampleId

REST = 50
"""After a look the journal rests so many times as long as it took: its share of the loop stays below 1/50."""

_Look = tuple[int, str | None, float | None, str | None]


class Journal:
    """Between the ledger of one life and the store."""

    def __init__(self, writer: Writer, past: Past, *, flush_s: float) -> None:
        """past: what the store holds."""
        self._writer, self._flush_s = writer, flush_s
        self._life = past.life
        self._run = past.run
        self._origins = past.origins
        self._groups = past.rows
        """What the store says of each living group."""
        self._samples = {sample: _look(sample) for sample in past.origins}
        """What of each living sample is in the store."""
        self._trained = past.trained
        self._marks = past.marks
        """The last two."""
        self._ended: list[tuple[Group, str]] = []
        self._settled: list[tuple[Sample, int | None]] = []
        self._rows: list[Row] = []
        self._pruned: list[SampleId] = []
        self._commit: asyncio.Future[None] | None = None

    def follow(self, ledger: Ledger) -> None:
        """Write this one down."""
        self._ledger = ledger

    def settle(self, sample: Sample, step: int | None) -> None:
        """The ledger says: a sample has its fate."""
        self._settled.append((sample, step))

    def end(self, group: Group, reason: str) -> None:
        """The ledger says: a group has its fate."""
        self._ended.append((group, reason))

    async def mark(
        self,
        checkpoint: str,
        *,
        round: int,
        version: int,
        step: int,
        parked: Iterable[Group],
        longest: Mapping[int, int],
        steps_at: Mapping[int, int],
    ) -> None:
        """Commit that a checkpoint is whole, with all that was until now.

        Raises:
            LedgerError: it cannot be written.
        """
        self._look_at_everything()
        mark = MarkRow(
            self._life,
            round,
            version,
            step,
            checkpoint,
            partial_rollouts=_json([group.prompt.index for group in parked]),
            longest=_json(longest),
            steps_at=_json(steps_at),
        )
        self._rows.append(mark)
        self._prune_behind(mark)
        await self._put_and_wait()

    async def keep(self) -> None:
        """Write from time to time, until it is cancelled.

        Raises:
            LedgerError: it cannot be written.
        """
        rest_s = self._flush_s
        while True:
            await asyncio.sleep(rest_s)
            if self._idle():
                began_s = now()
                self._look_at_everything()
                self._put()
                rest_s = max(self._flush_s, REST * (now() - began_s))

    async def finish(self) -> None:
        """Commit what is left.

        Raises:
            LedgerError: it cannot be written.
        """
        self._look_at_everything()
        await self._put_and_wait()

    # -- commits ------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        """No commit is under way. Raises what the last one raised."""
        if self._commit is None:
            return True
        if not self._commit.done():
            return False
        self._commit.result()
        return True

    def _put(self) -> None:
        if self._rows or self._pruned:
            self._commit = self._writer.put(Cut(self._rows, self._pruned))
            self._commit.add_done_callback(_heard)
            self._rows, self._pruned = [], []

    async def _put_and_wait(self) -> None:
        with waiting("the ledger to be written"):
            while not self._idle():
                assert self._commit
                await asyncio.wait([self._commit])
            self._put()
            while not self._idle():
                assert self._commit
                await asyncio.wait([self._commit])

    # -- looks --------------------------------------------------------------------------------------

    def _look_at_everything(self) -> None:
        totals = self._ledger.totals
        run = msgspec.structs.replace(
            self._run, num_drawn=totals.num_drawn, evaluated_tokens=totals.evaluated_tokens
        )
        if run != self._run:
            self._rows.append(run)
            self._run = run
        for group in self._ledger.living.values():
            self._look_at_group(group, "")
            for sample in group.samples:
                if sample.fate is None and self._samples.get(sample) != _look(sample):
                    self._rows += self._sample_rows(sample)
                    self._samples[sample] = _look(sample)
        for group, reason in self._ended:
            self._look_at_group(group, reason)
            del self._groups[group]
        for sample, step in self._settled:
            self._look_at_settled(sample, step)
        self._ended, self._settled = [], []

    def _look_at_group(self, group: Group, reason: str) -> None:
        old = self._groups.get(group)
        row = GroupRow(
            prompt=group.prompt.index,
            life=old.life if old else self._life,
            round=group.round_drawn,
            num_required=group.num_required,
            num_launched=group.num_launched,
            attempt=group.attempt,
            deferrals=group.deferrals,
            kept=_json([sample.id.number for sample in group.kept]),
            fate=group.fate,
            reason=reason,
        )
        if row != old:
            self._groups[group] = row
            self._rows.append(row)

    def _look_at_settled(self, sample: Sample, step: int | None) -> None:
        seen = self._samples.get(sample)
        if step is None:
            self._rows.append(self._sample_row(sample, pruned=True))
            if seen and seen[0]:
                self._pruned.append(sample.id)
        else:
            self._rows += self._sample_rows(sample)
            self._rows.append(TrainingRow(self._life, *sample.id, step))
            self._trained.append((step, self._sample_row(sample)))
        self._samples.pop(sample, None)
        self._origins.pop(sample, None)

    def _sample_rows(self, sample: Sample) -> Iterator[Row]:
        """The sample, and what it gained."""
        yield self._sample_row(sample)
        seen = self._samples.get(sample)
        start = seen[0] if seen else 0
        if ids := sample.completion_ids[start:]:
            logprobs = array("f", sample.behavior_logprobs[start:])
            yield TokensRow(*sample.id, start, array("i", ids).tobytes(), logprobs.tobytes())

    def _sample_row(self, sample: Sample, *, pruned: bool = False) -> SampleRow:
        return SampleRow(
            *sample.id,
            spans=_json(self._spans(sample)),
            finish_reason=sample.finish_reason,
            text="" if pruned else sample.text,
            reward=sample.reward,
            failure=sample.failure,
            fate=sample.fate,
            pruned=pruned,
            reference_logprobs=b"" if pruned else array("f", sample.reference_logprobs).tobytes(),
        )

    def _spans(self, sample: Sample) -> list[Origin]:
        """Those of earlier lives as they were stored, and what this life added."""
        origins = list(self._origins.get(sample, ()))
        known = sum(origin.num_tokens for origin in origins)
        for span in sample.spans:
            known -= span.num_tokens
            if known < 0:
                origins.append(Origin(self._life, span.version, min(-known, span.num_tokens)))
        return origins

    def _prune_behind(self, mark: MarkRow) -> None:
        """Forget what only marks before the last one need: if the newest checkpoint is damaged, the run can
        still go back to the one before it."""
        marks = [*self._marks, mark]
        for old in marks[:-2]:
            self._rows.append(msgspec.structs.replace(old, longest="{}", steps_at="{}"))
        for last in marks[-2:-1]:
            covered = [row for step, row in self._trained if step <= last.step]
            self._rows += (
                msgspec.structs.replace(row, text="", pruned=True, reference_logprobs=b"") for row in covered
            )
            self._pruned += (row.id for row in covered)
            self._trained = [(step, row) for step, row in self._trained if step > last.step]
        self._marks = marks[-2:]


class Unwritten:
    """The journal of a run that is not written down."""

    def follow(self, ledger: Ledger) -> None: ...

    def settle(self, sample: Sample, step: int | None) -> None: ...

    def end(self, group: Group, reason: str) -> None: ...

    async def mark(
        self,
        checkpoint: str,
        *,
        round: int,
        version: int,
        step: int,
        parked: Iterable[Group],
        longest: Mapping[int, int],
        steps_at: Mapping[int, int],
    ) -> None: ...

    async def keep(self) -> None: ...

    async def finish(self) -> None: ...


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _look(sample: Sample) -> _Look:
    """Changes whenever something of the sample is to be written."""
    return (sample.num_tokens, sample.finish_reason, sample.reward, sample.failure)


def _heard(commit: asyncio.Future[None]) -> None:
    """A failure that nobody waits for any more is no surprise."""
    if not commit.cancelled():
        commit.exception()
