"""Packing: samples are laid end to end in micro-batches of a bounded number of tokens, without padding.

The last token of a completion predicts nothing: it is a target and not an input.

Invariants: every sample with a completion is in exactly one micro-batch; a micro-batch exceeds the limit
only if it is a single sample; the result depends on the samples and their order only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.trainer.batch import TrainingSample
from tailrace.types import SampleId


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N samples with T input tokens and C completion tokens. [C] tensors are in the order of the samples."""

    ids: list[SampleId]
    """[N]"""
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]: starts at zero in each sample."""
    boundaries: Tensor
    """[N + 1] int32: the input tokens of sample n are boundaries[n] : boundaries[n + 1]."""
    max_length: int
    """Input tokens of the longest sample."""
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

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], device: torch.device) -> "MicroBatch":
        """Pack samples, all with a completion, in their order."""
        input_ids: list[int] = []
        position_ids: list[int] = []
        predictors: list[int] = []
        boundaries = [0]
        for sample in samples:
            input_ids += sample.prompt_ids + sample.completion_ids[:-1]
            position_ids += range(sample.num_input_tokens)
            predictors += range(len(input_ids) - len(sample.completion_ids), len(input_ids))
            boundaries.append(len(input_ids))

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            ids=[sample.id for sample in samples],
            input_ids=tensor(input_ids)[None],
            position_ids=tensor(position_ids)[None],
            boundaries=tensor(boundaries, torch.int32),
            max_length=max(sample.num_input_tokens for sample in samples),
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
