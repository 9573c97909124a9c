"""The sequence whose log-probs an engine is asked for: the probe of a publication (proof.py)."""

from collections.abc import Sequence

SCORED = 12
"""Tokens of a probe that are scored: the last ones."""


def probe_ids(prefix: int | None, vocabulary: int, max_tokens: int) -> tuple[int, ...]:
    """Return the fixed sequence for engines of a kind; empty if they answer no probe, or one is longer than
    the context of the model, `max_tokens`. `prefix`: as in EngineKind."""
    length = (max_tokens if prefix is None else prefix) + SCORED
    return tuple(spread(length, vocabulary)) if length < max_tokens else ()


def spread(length: int, vocabulary: int, start: int = 0) -> Sequence[int]:
    """Return token ids from all parts of the vocabulary. From start 0 on, its last one comes first."""
    return [(vocabulary - 1 - 7919 * place) % vocabulary for place in range(start, start + length)]
