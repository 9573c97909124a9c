"""Proof that an engine has the weights that were published: by its answers to a probe, after a load.

    checksums   of the tensors with which it computes, where it can read them: those published or not
    cold        its log-probs of the probe, with every key and value computed: those of the trainer or not
    warm        the same with the prefix from its cache, where a request would find it there: as cold or not

Limits. An engine that is exact gives the same bits for the same question: warm and cold must be equal, and
answers that do not move although the trainer's do are those of older weights. All other comparisons are
means of |difference| over the scored tokens. The trainer scores rounded weights: else what publications lose
by rounding would add up. The limit is SLACK times the run's own noise, the difference of engine and trainer
before the first load, when both have the weights of the model folder. It is at least LEAST of the type, and
at most SLACK times LEAST, because a server that is joined may begin with other weights.

    type        noise of 135M parameters        limit
    float32     0.00001                         0.001
    bfloat16    0.05 to 0.26                    0.5 to 1

A fault that changes log-probs by less, as one step with a small learning rate does, is found by checksums or
by the exact comparisons, and on a server only once the policy has moved by the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from tailrace.contracts.engine import Arrival
from tailrace.contracts.weights import DTYPE, Probe

SLACK = 4.0
LEAST: Mapping[DTYPE, float] = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats a token."""
MOVED: Mapping[DTYPE, float] = {"float32": 1e-4, "bfloat16": 0.01}
"""Nats a token: when the trainer's log-probs have moved so far, an exact engine gives other bits."""
NOT_FINITE = 1e9
"""The difference of log-probs one of which is not finite. JSON has no infinity."""
_COPIES = "older copies: each tensor has arrived, and it computes with others"
_REMEMBERED = 4
"""Publications whose answers are remembered, to name the one that an engine has instead."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Answer of an engine to a probe. `checksums` is empty where it cannot read its tensors."""

    warm: Sequence[float]
    cold: Sequence[float]
    checksums: Mapping[str, int] = field(default_factory=dict)


class Prover:
    """Judges the answers of one process of an engine.

    Args:
        probe: of its first load.
        before: its answer before that.
        exact: the same question gives the same bits.
        adapter: publications are adapters.
    """

    def __init__(
        self, probe: Probe, before: ProbeAnswer, *, exact: bool, dtype: DTYPE, adapter: bool
    ) -> None:
        self._exact, self._moved, self._adapter = exact, MOVED[dtype], adapter
        noise = min(_off(before.cold, probe.initial), LEAST[dtype])
        self.limit = max(LEAST[dtype], SLACK * noise)
        self._known: dict[int, tuple[ProbeAnswer, Sequence[float]]] = {0: (before, probe.initial)}
        """Answers of engine and trainer, by version: before the first load, and the last that arrived."""

    def judge(self, version: int, probe: Probe, answer: ProbeAnswer, seconds: float = 0.0) -> Arrival:
        """Return the differences, and why a publication has not arrived, if it has not."""
        cause = self._cause(version, probe, answer)
        if not cause:
            self._known[version] = answer, probe.expected
            while len(self._known) > _REMEMBERED:
                del self._known[list(self._known)[1]]
        return Arrival(
            version=version,
            difference=_off(answer.cold, probe.expected),
            cache_difference=_off(answer.warm, answer.cold),
            limit=self.limit,
            seconds=seconds,
            cause=cause,
        )

    def _cause(self, version: int, probe: Probe, answer: ProbeAnswer) -> str:
        older = {each: known for each, known in reversed(self._known.items()) if each != version}
        wrong = self._wrong_tensors(probe, answer.checksums, older)
        if not all(map(isfinite, answer.cold)):
            return f"not finite: its log-probs are not ({wrong or 'no tensor is known to be wrong'})"
        if wrong:
            return wrong
        for each, (old, trainers) in older.items():
            published = not old.checksums or answer.checksums != old.checksums
            moved = _off(probe.expected, trainers) > self._moved
            if self._exact and published and moved and answer.cold == old.cold:
                evidence = "its log-probs have not moved, and the trainer's have"
                return f"{_COPIES} ({evidence})" if answer.checksums else self._has(each, evidence)
        if (off := _off(answer.cold, probe.expected)) > self.limit:
            evidence = f"its log-probs are off by {off:.3g}, the limit is {self.limit:.3g}"
            if answer.checksums:
                return f"{_COPIES} ({evidence})"
            offs = {each: _off(answer.cold, trainers) for each, (_, trainers) in older.items()}
            for each in sorted(offs, key=lambda each: offs[each])[:1]:
                if offs[each] <= min(self.limit, off / 2):
                    return self._has(each, f"{evidence}, and off those of it by {offs[each]:.3g}")
            return f"tensors missing or changed ({evidence})"
        if (off := _off(answer.warm, answer.cold)) > (0.0 if self._exact else self.limit):
            right = "log-probs are right when the prefix is computed"
            return f"stale prefix cache: {right}, and off by {off:.3g} when it comes from the cache"
        return ""

    def _wrong_tensors(
        self, probe: Probe, found: Mapping[str, int], older: Mapping[int, tuple[ProbeAnswer, Sequence[float]]]
    ) -> str:
        """Name the tensors that differ from the published ones."""
        wrong = [name for name in found if found[name] != probe.checksums.get(name)]
        if not wrong:
            return ""
        for each, (old, _) in older.items():
            if found == old.checksums:
                return self._has(each, f"all {len(found)} tensors")
        known = [old.checksums for old, _ in older.values()]
        stale = [name for name in wrong if any(found[name] == each[name] for each in known)]
        what, names = ("missing", stale) if stale else ("changed on the way", wrong)
        named = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"tensors {what}: {len(names)} of {len(found)}: {named}"

    def _has(self, version: int, evidence: str) -> str:
        """The diagnosis: the engine still serves version n."""
        if self._adapter and not version:
            return f"adapter not active: it has the model without one ({evidence})"
        older = f"version {version}" if version else "the model that it started with"
        return f"weights not loaded: it computes with {older} ({evidence})"


def _off(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean |difference|; NOT_FINITE if a value is not finite."""
    off = fmean(abs(a - b) for a, b in zip(one, other, strict=True))
    return off if isfinite(off) else NOT_FINITE
