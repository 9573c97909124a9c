"""Online packing: samples laid end to end in micro-batches of a bounded size.

No padding: a micro-batch is [1, T], its samples one after another, `boundaries` between them. The last
token of a completion predicts nothing, so it is a target and is not fed.

What must hold: every sample with a completion is in exactly one micro-batch; a micro-batch keeps the
budget unless a single sample exceeds it; the result depends on the samples and their order alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.trainer.wire import TrainSample

WORTH_SHARING = 400
"""Cost, in tokens of a forward pass, of what two processes compute faster than one."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T fed tokens and C completion tokens of N samples; each [C] tensor is in the order of the samples."""

    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]: restarts at zero with each sample."""
    boundaries: Tensor
    """[N + 1] int32: sample n is fed at boundaries[n] : boundaries[n + 1]."""
    max_length: int
    """Fed tokens of the longest sample."""
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
    def of(cls, samples: Sequence[TrainSample], device: torch.device) -> "MicroBatch":
        """Lay samples, none with an empty completion, end to end."""
        ids: list[int] = []
        positions: list[int] = []
        boundaries = [0]
        predictors: list[int] = []
        for sample in samples:
            length = fed_tokens(sample)
            ids += sample.prompt_ids
            ids += sample.completion_ids[:-1]
            positions += range(length)
            boundaries.append(len(ids))
            predictors += range(len(ids) - len(sample.completion_ids), len(ids))
        targets = [token for sample in samples for token in sample.completion_ids]
        recorded = [logprob for sample in samples for logprob in sample.logprobs]
        reference = [logprob for sample in samples for logprob in sample.reference_logprobs]
        carried = [t < sample.num_carried for sample in samples for t in range(len(sample.completion_ids))]
        counts = torch.tensor([len(sample.completion_ids) for sample in samples])
        advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
        return cls(
            input_ids=torch.tensor([ids]).to(device),
            position_ids=torch.tensor([positions]).to(device),
            boundaries=torch.tensor(boundaries, dtype=torch.int32).to(device),
            max_length=max(map(fed_tokens, samples)),
            predictors=torch.tensor(predictors).to(device),
            targets=torch.tensor(targets).to(device),
            recorded_logprobs=torch.tensor(recorded, dtype=torch.float32).to(device),
            reference_logprobs=torch.tensor(reference, dtype=torch.float32).to(device),
            carried=torch.tensor(carried).to(device),
            advantages=advantages.to(device),
            num_tokens=counts.to(device),
        )


def fed_tokens(sample: TrainSample) -> int:
    """What a sample costs the model: its prompt and all but the last token of its completion."""
    return len(sample.prompt_ids) + len(sample.completion_ids) - 1


def pack(samples: Sequence[TrainSample], budget: int) -> list[list[TrainSample]]:
    """Cut samples into micro-batches of at most `budget` fed tokens: first fit, longest first.

    Samples without a completion have nothing to compute and are left out; one longer than the budget
    goes alone.
    """
    bins: list[list[TrainSample]] = []
    room: list[int] = []
    with_completion = [sample for sample in samples if sample.completion_ids]
    for sample in sorted(with_completion, key=fed_tokens, reverse=True):
        length = fed_tokens(sample)
        place = next((i for i, left in enumerate(room) if length <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(sample)
        room[place] -= length
    return bins


def share(
    samples: Sequence[TrainSample], num_parts: int, cost: Callable[[TrainSample], int]
) -> list[list[TrainSample]]:
    """Cut samples into parts of like cost: the dearest first, each to the part that has least. One part where
    that is faster."""
    if num_parts == 1 or sum(map(cost, samples)) < WORTH_SHARING:
        return [list(samples)]
    parts: list[list[TrainSample]] = [[] for _ in range(num_parts)]
    costs = [0] * num_parts
    for sample in sorted(samples, key=cost, reverse=True):
        least = costs.index(min(costs))
        parts[least].append(sample)
        costs[least] += cost(sample)
    return parts
