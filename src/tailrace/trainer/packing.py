"""Online packing: samples laid end to end in micro-batches of a bounded size.

No padding: a micro-batch is [1, T], its sequences one after another, `boundaries` between them. The last
token of a completion predicts nothing, so it is a target and is not fed.

Samples come in families. Those of one family have one prompt, which is laid out once: their completions
follow it, each a sequence that goes on from the prompt. A family of one is one sequence.

What must hold: every sample with a completion is in exactly one micro-batch; a micro-batch keeps the
budget unless a single sample exceeds it; the result depends on the samples and their order alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId

WORTH_SHARING = 400
"""Cost, in tokens of a forward pass, of what two processes compute faster than one."""


Family = Sequence[TrainingSample]
"""Samples with one prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T fed tokens in S sequences; C completion tokens of N samples, each [C] tensor in their order."""

    ids: list[SampleId]
    """[N]"""
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]: restarts at zero with each sequence, but for those that go on from a prompt, the last sequence
    that started at zero."""
    boundaries: Tensor
    """[S + 1] int32: sequence s is fed at boundaries[s] : boundaries[s + 1]."""
    max_length: int
    """Fed tokens of the longest sequence."""
    predictors: Tensor
    """[C]: the place in 0..T-1 from which each completion token is predicted."""
    targets: Tensor
    """[C]: the completion tokens."""
    recorded_logprobs: Tensor
    """[C] float32: under the policies that drew the tokens."""
    reference_logprobs: Tensor
    """[C] float32: under the reference model; [0] where there is none."""
    carried: Tensor
    """[C] bool: drawn before the last publication."""
    advantages: Tensor
    """[N] float32"""
    num_tokens: Tensor
    """[N]: completion tokens of each sample; they sum to C."""

    @classmethod
    def of(cls, families: Sequence[Family], device: torch.device) -> "MicroBatch":
        """Lay families of samples, none with an empty completion, end to end."""
        layout = _Layout()
        for family in families:
            layout.add(family)
        samples = [sample for family in families for sample in family]
        targets = [token for sample in samples for token in sample.completion_ids]
        recorded = [logprob for sample in samples for logprob in sample.behavior_logprobs]
        reference = [logprob for sample in samples for logprob in sample.reference_logprobs]
        carried = [t < sample.num_carried for sample in samples for t in range(len(sample.completion_ids))]
        counts = [len(sample.completion_ids) for sample in samples]
        advantages = [sample.advantage for sample in samples]

        def tensor(numbers: Sequence[float], dtype: type[np.generic]) -> Tensor:
            # By numpy: torch takes five times as long to read a list.
            return torch.from_numpy(np.array(numbers, dtype)).to(device)

        return cls(
            ids=[sample.id for sample in samples],
            input_ids=tensor(layout.ids, np.int64)[None],
            position_ids=tensor(layout.positions, np.int64)[None],
            boundaries=tensor(layout.boundaries, np.int32),
            max_length=max(end - start for start, end in pairwise(layout.boundaries)),
            predictors=tensor(layout.predictors, np.int64),
            targets=tensor(targets, np.int64),
            recorded_logprobs=tensor(recorded, np.float32),
            reference_logprobs=tensor(reference, np.float32),
            carried=tensor(carried, np.bool_),
            advantages=tensor(advantages, np.float32),
            num_tokens=tensor(counts, np.int64),
        )


class _Layout:
    """Where fed tokens stand, as MicroBatch has it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.boundaries = [0]
        self.predictors: list[int] = []

    def add(self, family: Family) -> None:
        prompt = family[0].prompt_ids
        if len(family) == 1:
            self._feed([*prompt, *family[0].completion_ids[:-1]], 0)
            self.predictors += range(len(self.ids) - len(family[0].completion_ids), len(self.ids))
            return
        self._feed(prompt, 0)
        last = len(self.ids) - 1
        for sample in family:
            self.predictors += [last, *range(len(self.ids), len(self.ids) + len(sample.completion_ids) - 1)]
            self._feed(sample.completion_ids[:-1], len(prompt))

    def _feed(self, ids: list[int], start: int) -> None:
        """A sequence at the positions from `start` on; none, where there are no tokens."""
        if ids:
            self.ids += ids
            self.positions += range(start, start + len(ids))
            self.boundaries.append(len(self.ids))


def fed_tokens(family: Family) -> int:
    """What a family costs the model: its prompt, and all but the last token of each completion."""
    return len(family[0].prompt_ids) + sum(max(0, len(sample.completion_ids) - 1) for sample in family)


def by_prompt(samples: Sequence[TrainingSample]) -> list[Family]:
    """Families as large as can be, in the order in which their prompts come first."""
    found: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        found.setdefault(tuple(sample.prompt_ids), []).append(sample)
    return list(found.values())


def pack(families: Sequence[Family], budget: int) -> list[list[Family]]:
    """Cut families into micro-batches of at most `budget` fed tokens: first fit, longest first.

    Samples without a completion have nothing to compute and are left out. A family that is longer than the
    budget is cut into several; a sample that is goes alone.
    """
    bins: list[list[Family]] = []
    room: list[int] = []
    parts = [part for family in families for part in _cut(family, budget)]
    for part in sorted(parts, key=fed_tokens, reverse=True):
        length = fed_tokens(part)
        place = next((i for i, left in enumerate(room) if length <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(part)
        room[place] -= length
    return bins


def _cut(family: Family, budget: int) -> list[Family]:
    parts: list[list[TrainingSample]] = []
    for sample in family:
        if not sample.completion_ids:
            continue
        if not parts or fed_tokens([*parts[-1], sample]) > budget:
            parts.append([])
        parts[-1].append(sample)
    return list(parts)


def share(
    samples: Sequence[TrainingSample], num_parts: int, cost: Callable[[TrainingSample], float]
) -> list[list[TrainingSample]]:
    """Cut samples into parts of like cost: the dearest first, each to the part that has least. One part where
    that is faster."""
    if num_parts == 1 or sum(map(cost, samples)) < WORTH_SHARING:
        return [list(samples)]
    parts: list[list[TrainingSample]] = [[] for _ in range(num_parts)]
    costs = [0.0] * num_parts
    for sample in sorted(samples, key=cost, reverse=True):
        least = costs.index(min(costs))
        parts[least].append(sample)
        costs[least] += cost(sample)
    return parts
