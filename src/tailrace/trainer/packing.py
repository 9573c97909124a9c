"""Packing: samples are laid end to end in micro-batches of a bounded number of tokens, without padding.

The last token of a completion predicts nothing: it is a target and not an input. The environment's tokens of
an episode are inputs and no targets. A sample whose history was rewritten is several sequences, which stay in
one micro-batch: losses take means over the sample.

Invariants: every sample with a completion is in exactly one micro-batch; a micro-batch exceeds the limit
only if it is a single sample; the result depends on the samples and their order only.

The ranks of a sharded model compute side by side, a micro-batch each, and must all compute equally often. A
rank that has none left computes a filler, which counts for nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tailrace.trainer.batch import TrainingSample
from tailrace.types import SampleId


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N samples with T input tokens and C completion tokens, in S sequences: one for each branch of a sample
    (turns.py). [C] tensors are in the order of the samples."""

    ids: list[SampleId]
    """[N]"""
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]: starts at zero in each sequence."""
    boundaries: Tensor
    """[S + 1] int32: the input tokens of sequence s are boundaries[s] : boundaries[s + 1]."""
    lengths: list[int]
    """[S]: input tokens of each sequence, in host memory."""
    predictors: Tensor
    """[C]: the index in 0..T-1 of the input token that predicts each completion token."""
    targets: Tensor
    """[C]: the completion tokens."""
    behavior_logprobs: Tensor
    """[C] float32: log-probs under the policies that generated the tokens."""
    reference_logprobs: Tensor
    """[C] float32: log-probs under the reference model. [0] if there is none."""
    carried: Tensor
    """[C] bool: True for tokens generated before the last publication."""
    advantages: Tensor
    """[N] float32"""
    num_tokens: Tensor
    """[N]: completion tokens of each sample. Their sum is C."""
    is_filler: bool = False
    """Computed only because other ranks compute a micro-batch."""

    @classmethod
    def filler(cls, device: torch.device) -> "MicroBatch":
        """One prompt token and one completion token."""
        sample = TrainingSample(SampleId(0, 0, 0), [0], [0], [0.0], 0.0, [0.0])
        return replace(cls.of([sample], device), is_filler=True)

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], device: torch.device) -> "MicroBatch":
        """Pack samples, all with a completion, in their order."""
        input_ids: list[int] = []
        position_ids: list[int] = []
        predictors: list[int] = []
        boundaries = [0]
        for sample, sequence in [(each, sequence) for each in samples for sequence in each.sequences]:
            input_ids += sequence.context_ids
            start = sequence.start
            for end, observation in [*sequence.observations, (sequence.end, [])]:
                predictors += range(len(input_ids) - 1, len(input_ids) - 1 + end - start)
                input_ids += sample.completion_ids[start:end] + observation
                start = end
            input_ids.pop()
            position_ids += range(len(input_ids) - boundaries[-1])
            boundaries.append(len(input_ids))

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            ids=[sample.id for sample in samples],
            input_ids=tensor(input_ids)[None],
            position_ids=tensor(position_ids)[None],
            boundaries=tensor(boundaries, torch.int32),
            lengths=[end - start for start, end in itertools.pairwise(boundaries)],
            predictors=tensor(predictors),
            targets=tensor([token for sample in samples for token in sample.completion_ids]),
            behavior_logprobs=tensor([p for s in samples for p in s.behavior_logprobs], torch.float32),
            reference_logprobs=tensor([p for s in samples for p in s.reference_logprobs], torch.float32),
            carried=tensor(
                [t < s.num_carried for s in samples for t in range(len(s.completion_ids))], torch.bool
            ),
            advantages=tensor([sample.advantage for sample in samples], torch.float32),
            num_tokens=tensor([len(sample.completion_ids) for sample in samples]),
        )


def pack(samples: Sequence[TrainingSample], max_tokens: int) -> list[list[TrainingSample]]:
    """Divide samples into micro-batches of at most `max_tokens` input tokens: first fit, longest first.

    Samples without a completion are left out. A sample longer than `max_tokens` is alone.
    """
    bins: list[list[TrainingSample]] = []
    free: list[int] = []
    complete = [sample for sample in samples if sample.completion_ids]
    for sample in sorted(complete, key=lambda sample: sample.num_input_tokens, reverse=True):
        length = sample.num_input_tokens
        index = next((i for i, room in enumerate(free) if length <= room), len(bins))
        if index == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[index].append(sample)
        free[index] -= length
    return bins


def take_full(
    samples: Sequence[TrainingSample], min_tokens: int, max_tokens: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Divide samples into those to compute now and those that wait for others: all if they have fewer than
    `min_tokens`, else the emptiest micro-batch of `pack` where that has fewer."""
    if _num_tokens(samples) < min_tokens:
        return [], list(samples)
    bins = sorted(pack(samples, max_tokens), key=_num_tokens, reverse=True)
    rest = bins.pop() if len(bins) > 1 and _num_tokens(bins[-1]) < min_tokens else []
    return list(itertools.chain.from_iterable(bins)), rest


def share(
    samples: Sequence[TrainingSample], max_tokens: int, *, rank: int, num_ranks: int
) -> list[list[TrainingSample]]:
    """Divide samples into micro-batches, and return those of one rank. An empty one stands for a filler.

    One rank has those of `pack`. With more ranks the tokens are divided evenly over as many rounds as `pack`
    would need, if the limit allows that.
    """
    bins = pack(samples, max_tokens)
    if num_ranks > 1:
        num_bins = -(-len(bins) // num_ranks) * num_ranks
        even = _divide_evenly(samples, num_bins)
        if all(len(bin) == 1 or _num_tokens(bin) <= max_tokens for bin in even if bin):
            bins = even
        bins = sorted(bins, key=_num_tokens, reverse=True) + [[]] * (num_bins - len(bins))
    return bins[rank::num_ranks]


def _divide_evenly(samples: Sequence[TrainingSample], num_bins: int) -> list[list[TrainingSample]]:
    """Put each sample with a completion, the longest first, into the bin with the fewest tokens."""
    bins: list[list[TrainingSample]] = [[] for _ in range(num_bins)]
    complete = [sample for sample in samples if sample.completion_ids]
    for sample in sorted(complete, key=lambda sample: sample.num_input_tokens, reverse=True):
        min(bins, key=_num_tokens).append(sample)
    return bins


def _num_tokens(bin: Sequence[TrainingSample]) -> int:
    return sum(sample.num_input_tokens for sample in bin)
