"""Proof that an engine has the weights that were published: by its answers to a probe, after each load.

    checksums   of the tensors with which it computes, where it can read them: those published or not
    cold        its log-probs of the probe, with every key and value computed: those of the trainer or not
    warm        the same with the prefix from its cache: as cold or not

Limits. An engine that is exact gives the same bits for the same question: warm and cold must be equal, and
answers that do not move although the trainer's do are those of older weights. All other comparisons are
means of |difference| over the scored tokens. Their limit follows from the run's own noise: the difference of
engine and trainer before the first load, when both have the weights of the model folder, is what numerics
alone make. The limit is SLACK times that, at least LEAST of the coarser type of the two and at most SLACK**2
times LEAST, because a server that is joined may begin with other weights.

    type        noise of 135M parameters        limit
    float32     0.00001                         0.001
    bfloat16    0.03 to 0.06                    0.12 to 0.24

So a fault that changes log-probs by less than the limit, as a single step with a small learning rate does, is
found by checksums or by the exact comparisons, and on a server only once the policy has moved by the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from tailrace.engine.base import Arrival
from tailrace.weights.base import DTYPE, Probe

SLACK = 4.0
LEAST: Mapping[DTYPE, float] = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats a token."""
MOVED = 0.1
"""Of LEAST: when the trainer's log-probs have moved so far, an exact engine gives other bits."""
SCORED = 12
"""Tokens of a probe that are scored: the last ones."""
PREFIXES = {"native": 8, "vllm": 276}
"""Tokens before them, by the kind of the engine: prefix caches of servers count in blocks, of up to 256
tokens. Engines of other kinds answer no probe."""
NOT_FINITE = 1e9
"""The difference of log-probs one of which is not finite. JSON has no infinity."""
_NAMED = 3
"""Tensors that a cause names, at most."""
_REMEMBERED = 4
"""Publications whose checksums are remembered."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What an engine says to a probe. `checksums` is empty where it cannot read its tensors."""

    warm: Sequence[float]
    cold: Sequence[float]
    checksums: Mapping[str, int] = field(default_factory=dict)


class Prover:
    """Judges the answers of one life of an engine.

    Args:
        before: its answer before its first load.
        exact: the same question gives the same bits.
        dtype: the coarser type of engine and trainer.
        adapter: publications are adapters.
    """

    def __init__(
        self, probe: Probe, before: ProbeAnswer, *, exact: bool, dtype: DTYPE, adapter: bool
    ) -> None:
        self._exact, self._least, self._adapter = exact, LEAST[dtype], adapter
        noise = min(_off(before.cold, probe.initial), SLACK * self._least)
        self.limit = max(self._least, SLACK * noise)
        self._before = before
        self._moved = before.cold, probe.initial
        """The newest answer that differed from the one before it, and the trainer's of then."""
        self._published: dict[int, Mapping[str, int]] = {0: before.checksums}
        """Checksums of the last publications that it was to load, by version."""

    def judge(self, probe: Probe, answer: ProbeAnswer, seconds: float = 0.0) -> Arrival:
        """Return the differences, and why the newest publication has not arrived, if it has not."""
        version, expected = list(probe.expected.items())[-1]
        arrival = Arrival(
            version=version,
            difference=_off(answer.cold, expected),
            cache_difference=_off(answer.warm, answer.cold),
            limit=self.limit,
            num_tensors=len(answer.checksums),
            seconds=seconds,
            cause=self._cause(probe, answer, version),
        )
        if answer.cold != self._moved[0]:
            self._moved = answer.cold, expected
        self._published[version] = probe.checksums
        while len(self._published) > _REMEMBERED:
            del self._published[next(iter(self._published))]
        return arrival

    def _cause(self, probe: Probe, answer: ProbeAnswer, version: int) -> str:
        expected, cold, limit = probe.expected[version], answer.cold, self.limit
        wrong = [name for name, found in answer.checksums.items() if found != probe.checksums.get(name)]
        if wrong:
            for older, checksums in reversed(self._published.items()):
                if older != version and answer.checksums == checksums:
                    return _not_loaded(older, f"all {len(checksums)} tensors are those of it")
            named = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
            return (
                f"tensors missing: {len(wrong)} of {len(answer.checksums)} are not those published: {named}"
            )
        has_moved = _off(expected, self._moved[1]) > MOVED * self._least
        if self._exact and has_moved and cold == self._moved[0]:
            if self._adapter and cold == self._before.cold:
                return _NO_ADAPTER
            if answer.checksums:
                return "weights not loaded: the tensors are there, and it computes with older ones"
            return "weights not loaded: its log-probs have not moved, and the trainer's have"
        if (off := _off(cold, expected)) > limit:
            if self._adapter and _off(cold, probe.initial) <= min(limit, off / 2):
                return _NO_ADAPTER
            known = {0: probe.initial, **probe.expected}
            others = {each: _off(cold, known[each]) for each in known if each != version}
            nearest = min(others, key=lambda each: others[each])
            if others[nearest] <= min(limit, off / 2):
                evidence = f"log-probs are off those by {others[nearest]:.3g}, and off the new by {off:.3g}"
                return _not_loaded(nearest, evidence)
            which = "each tensor arrived" if answer.checksums else "which cannot be seen from outside"
            return f"tensors missing or changed ({which}): log-probs are off by {off:.3g} (limit {limit:.3g})"
        if (off := _off(answer.warm, cold)) > (0.0 if self._exact else limit):
            return (
                f"stale prefix cache: log-probs are right when the prefix is computed, and off by {off:.3g} "
                "when it comes from the cache"
            )
        return ""


_NO_ADAPTER = "adapter not active: its log-probs are those of the model without an adapter"


def _not_loaded(version: int, evidence: str) -> str:
    older = f"version {version}" if version else "the model that it started with"
    return f"weights not loaded: it has {older} ({evidence})"


def _off(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean |difference|; NOT_FINITE if a value is not finite."""
    off = fmean(abs(a - b) for a, b in zip(one, other, strict=True))
    return off if isfinite(off) else NOT_FINITE


def probe_ids(kind: str, vocabulary: int, max_tokens: int) -> tuple[int, ...]:
    """Return the fixed sequence for engines of a kind; empty if they answer no probe or the context of the
    model, `max_tokens`, is too short."""
    length = min(PREFIXES.get(kind, 0) + SCORED, max_tokens)
    return tuple(spread(length, vocabulary)) if length > SCORED else ()


def spread(length: int, vocabulary: int, start: int = 0) -> Sequence[int]:
    """Return token ids from all parts of the vocabulary. From start 0 on, its last one comes first."""
    return [(vocabulary - 1 - 7919 * place) % vocabulary for place in range(start, start + length)]


def coarser(one: DTYPE, other: DTYPE) -> DTYPE:
    """Return the coarser of two types."""
    return "float32" if {one, other} == {"float32"} else "bfloat16"
