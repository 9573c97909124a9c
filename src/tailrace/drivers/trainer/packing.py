"""Packing: samples are laid end to end in micro-batches of a bounded number of tokens, without padding.

The last token of a completion predicts nothing: it is a target and not an input. The environment's tokens of
an episode are inputs and no targets. A sample whose history was rewritten is several sequences, which stay in
one micro-batch: losses take means over the sample.

The samples of a group have one prompt, and a micro-batch computes it once: sequences with the same context
share its input tokens. So the samples of a group are packed together where they fit.

    input     p p p a a a b b        two completions, aaa. and bb., of the prompt ppp
    position  0 1 2 3 4 5 3 4
    keys      p p p a a a, p p p b b

Invariants: every sample with a token in the loss is in exactly one micro-batch; a micro-batch exceeds the
limit only if it is a single sample; the result depends on the samples and their order only.

Some architectures cannot share a context, or cannot be packed (`Packing`). Then each sequence has its own
context, or each sample a micro-batch of its own, whose sequences are computed one at a time.

The ranks of a sharded model compute side by side, a micro-batch each, and must all compute equally often. A
rank that has none left computes a filler, which counts for nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.types import SampleId


class Packing(Enum):
    """Ways to compute several samples; the first is the fastest."""

    SHARED = "packed, with shared prompts"
    SEPARATE = "packed, without shared prompts"
    ALONE = "one sequence at a time"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N samples with T input tokens and C completion tokens, in S sequences: one for each branch of a sample
    (turns.py). [C] tensors are in the order of the samples. The first of several sequences with the same
    context has its input tokens; another one has none if its completion is one token, and is left out."""

    ids: list[SampleId]
    """[N]"""
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]: starts at zero in each sequence, or after the context that it shares."""
    boundaries: Tensor
    """[S + 1] int32: the input tokens of sequence s are boundaries[s] : boundaries[s + 1]."""
    lengths: list[int]
    """[S]: input tokens of each sequence, in host memory."""
    keys: Tensor
    """[K]: the indices in 0..T-1 that sequences attend to: those of a shared context, then their own."""
    key_boundaries: Tensor
    """[S + 1] int32: those of sequence s are keys[key_boundaries[s] : key_boundaries[s + 1]]."""
    key_lengths: list[int]
    """[S], in host memory."""
    predictors: Tensor
    """[C]: the index in 0..T-1 of the input token that predicts each completion token."""
    targets: Tensor
    """[C]: the completion tokens."""
    behavior_logprobs: Tensor
    """[C] float32: log-probs under the policies that generated the tokens."""
    reference_logprobs: Tensor
    """[C] float32: log-probs under the reference model. [0] if there is none."""
    masked: Tensor
    """[C] bool: True for tokens that are not in the loss."""
    carried: Tensor
    """[N] bool: True for samples with tokens generated before the last publication."""
    advantages: Tensor
    """[N] float32"""
    num_tokens: Tensor
    """[N]: completion tokens of each sample. Their sum is C."""
    packing: Packing = Packing.SHARED
    is_filler: bool = False
    """Computed only because other ranks compute a micro-batch."""

    @classmethod
    def filler(cls, device: torch.device, packing: Packing = Packing.SHARED) -> "MicroBatch":
        """One prompt token and one completion token."""
        sample = TrainingSample(SampleId(0, 0, 0), [0], [0], [0.0], 0.0, [0.0])
        return replace(cls.of([sample], device, packing), is_filler=True)

    @classmethod
    def of(
        cls, samples: Sequence[TrainingSample], device: torch.device, packing: Packing = Packing.SHARED
    ) -> "MicroBatch":
        """Pack samples, all with a completion, in their order."""
        input_ids: list[int] = []
        position_ids: list[int] = []
        predictors: list[int] = []
        keys: list[int] = []
        boundaries, key_boundaries = [0], [0]
        contexts: dict[tuple[int, ...], int] = {}
        for sample, sequence in [(each, sequence) for each in samples for sequence in each.sequences]:
            start, begin, length = sequence.start, len(input_ids), len(sequence.context_ids)
            first = contexts.setdefault(tuple(sequence.context_ids), begin)
            first = first if packing is Packing.SHARED else begin
            shared = length if first < begin else 0
            input_ids += sequence.context_ids[shared:]
            for end, observation in [*sequence.observations, (sequence.end, [])]:
                if end > start:
                    predictors.append(len(input_ids) - 1 if len(input_ids) > begin else first + length - 1)
                    predictors += range(len(input_ids), len(input_ids) + end - start - 1)
                input_ids += sample.completion_ids[start:end] + observation
                start = end
            input_ids.pop()
            if len(input_ids) > begin:
                position_ids += range(shared, shared + len(input_ids) - begin)
                keys += [*range(first, first + shared), *range(begin, len(input_ids))]
                boundaries.append(len(input_ids))
                key_boundaries.append(len(keys))

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            ids=[sample.id for sample in samples],
            input_ids=tensor(input_ids)[None],
            position_ids=tensor(position_ids)[None],
            boundaries=tensor(boundaries, torch.int32),
            lengths=[end - start for start, end in itertools.pairwise(boundaries)],
            keys=tensor(keys),
            key_boundaries=tensor(key_boundaries, torch.int32),
            key_lengths=[end - start for start, end in itertools.pairwise(key_boundaries)],
            predictors=tensor(predictors),
            targets=tensor([token for sample in samples for token in sample.completion_ids]),
            behavior_logprobs=tensor([p for s in samples for p in s.behavior_logprobs], torch.float32),
            reference_logprobs=tensor([p for s in samples for p in s.reference_logprobs], torch.float32),
            masked=tensor(
                [t < s.num_masked for s in samples for t in range(len(s.completion_ids))], torch.bool
            ),
            carried=tensor([sample.is_carried for sample in samples], torch.bool),
            advantages=tensor([sample.advantage for sample in samples], torch.float32),
            num_tokens=tensor([len(sample.completion_ids) for sample in samples]),
            packing=packing,
        )

    def by_sample(self, values: Tensor) -> list[list[float]]:
        """Values of completion tokens, [C], of each sample."""
        return [part.tolist() for part in torch.split(values.detach().cpu(), self.num_tokens.tolist())]


MAX_KEYS = 2
"""The most keys of all sequences of a micro-batch, for each token that it may have."""


class _Item(NamedTuple):
    sample: TrainingSample
    num_tokens: int
    contexts: dict[int, int]
    """The lengths of the contexts of its sequences; equal contexts have one number."""


class _Bin:
    """The samples of a micro-batch while it is packed."""

    def __init__(self) -> None:
        self.samples: list[TrainingSample] = []
        self.num_tokens = self.num_keys = 0
        self.contexts: set[int] = set()

    def num_tokens_with(self, item: _Item) -> int:
        """Input tokens with one more sample: contexts that are here already cost nothing."""
        known = sum(length for name, length in item.contexts.items() if name in self.contexts)
        return self.num_tokens + item.num_tokens - known

    def fits(self, max_tokens: int, item: _Item | None = None) -> bool:
        """Whether it may be a micro-batch, with one more sample. The keys and values of a shared context are
        copied for each sequence, so they are bounded, too."""
        num_tokens = self.num_tokens_with(item) if item else self.num_tokens
        num_keys = self.num_keys + (item.num_tokens if item else 0)
        return num_tokens <= max_tokens and num_keys <= MAX_KEYS * max_tokens

    def add(self, item: _Item) -> None:
        self.num_tokens = self.num_tokens_with(item)
        self.num_keys += item.num_tokens
        self.samples.append(item.sample)
        self.contexts |= item.contexts.keys()


def _items(samples: Sequence[TrainingSample], packing: Packing) -> list[_Item]:
    """The samples with a token in the loss: those of a prompt together, the longest first."""
    names: dict[object, int] = {}
    groups: dict[tuple[int, ...], list[_Item]] = {}
    complete = [sample for sample in samples if sample.num_loss_tokens]
    for sample in sorted(complete, key=lambda sample: sample.num_input_tokens, reverse=True):
        prompt, *others = (tuple(ids) for ids in (sample.prompt_ids, *(ids for _, ids in sample.branches)))
        contexts = {
            names.setdefault(each if packing is Packing.SHARED else object(), len(names)): len(each)
            for each in (prompt, *others)
        }
        groups.setdefault(prompt, []).append(_Item(sample, sample.num_input_tokens, contexts))
    return list(itertools.chain.from_iterable(groups.values()))


def _pack(items: Sequence[_Item], max_tokens: int, packing: Packing) -> list[_Bin]:
    """First fit; a micro-batch with the sample's prompt comes first."""
    bins: list[_Bin] = []
    max_tokens = 0 if packing is Packing.ALONE else max_tokens
    for item in items:
        fitting = [bin for bin in bins if bin.fits(max_tokens, item)]
        bin = min(fitting, key=lambda bin: bin.contexts.isdisjoint(item.contexts), default=None)
        if bin is None:
            bins.append(bin := _Bin())
        bin.add(item)
    return bins


def pack(
    samples: Sequence[TrainingSample], max_tokens: int, packing: Packing = Packing.SHARED
) -> list[list[TrainingSample]]:
    """Divide samples into micro-batches of at most `max_tokens` input tokens: first fit, longest first, the
    samples of a prompt one after another.

    Samples without a token in the loss are left out. A sample longer than `max_tokens` is alone.
    """
    return [bin.samples for bin in _pack(_items(samples, packing), max_tokens, packing)]


def take_full(
    samples: Sequence[TrainingSample], min_tokens: int, max_tokens: int, packing: Packing = Packing.SHARED
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Divide samples into those to compute now and those that wait for others: all if they have fewer than
    `min_tokens`, else the emptiest micro-batch of `pack` where that has fewer."""
    bins = _pack(_items(samples, packing), max_tokens, packing)
    bins.sort(key=lambda bin: bin.num_tokens, reverse=True)
    if sum(bin.num_tokens for bin in bins) < min_tokens:
        return [], list(samples)
    rest = bins.pop().samples if len(bins) > 1 and bins[-1].num_tokens < min_tokens else []
    return [sample for bin in bins for sample in bin.samples], rest


def share(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    packing: Packing = Packing.SHARED,
    *,
    rank: int,
    num_ranks: int,
) -> list[list[TrainingSample]]:
    """Divide samples into micro-batches, and return those of one rank. An empty one stands for a filler.

    One rank has those of `pack`. With more ranks the tokens are divided evenly over as many rounds as `pack`
    would need, if the limit allows that.
    """
    items = _items(samples, packing)
    bins = _pack(items, max_tokens, packing)
    if num_ranks > 1:
        num_bins = -(-len(bins) // num_ranks) * num_ranks
        even = [_Bin() for _ in range(num_bins)]
        for item in items:
            min(even, key=partial(_Bin.num_tokens_with, item=item)).add(item)
        if all(len(bin.samples) <= 1 or bin.fits(max_tokens) for bin in even):
            bins = even
        bins = sorted(bins, key=lambda bin: bin.num_tokens, reverse=True)
        bins += [_Bin() for _ in range(num_bins - len(bins))]
    return [bin.samples for bin in bins[rank::num_ranks]]
