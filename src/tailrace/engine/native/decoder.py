"""One token for every running response, and the contexts before: the one place that chooses between torch and
compiled kernels."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.engine.base import SamplingSettings
from tailrace.engine.native.attention import DecodeAttention
from tailrace.engine.native.cache import Block, Tier
from tailrace.engine.native.model import Model
from tailrace.engine.native.prefill import prefill
from tailrace.engine.native.sampler import draw


class Decoder(Protocol):
    """Decode steps and prefills."""

    def __call__(
        self, tiers: Sequence[Tier], ids: Sequence[int], lengths: Sequence[int], uniforms: NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        """Draw a token for each response and keep the keys and values of the one before it.

        Args:
            tiers: those with responses.
            ids: the newest token of each response, in the order of the rows: tier by tier, slot by slot.
            lengths: tokens of each response.
            uniforms: [T], float64, in [0, 1): what each token is drawn with.

        Returns:
            ids and log-probs.
        """

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[Block]:
        """Keys and values of whole contexts, in their order."""


class TorchDecoder:
    """On any device, in any type."""

    def __init__(self, model: Model, sampling: SamplingSettings) -> None:
        self._model = model
        self._sampling = sampling

    def __call__(
        self, tiers: Sequence[Tier], ids: Sequence[int], lengths: Sequence[int], uniforms: NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        model = self._model
        positions = torch.tensor(lengths, device=model.device) - 1
        attention = DecodeAttention(tiers, lengths, positions)
        x = model.forward(torch.tensor(ids, device=model.device), positions, attention)
        chances = torch.from_numpy(uniforms).to(model.device)
        drawn, logprobs = draw(model.logits(x), chances, self._sampling)
        return drawn.tolist(), logprobs.tolist()

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[Block]:
        return prefill(self._model, contexts)


def decoder_for(model: Model, sampling: SamplingSettings, *, max_tokens: int) -> Decoder:
    """Compiled on a CPU in float32 (its kernels are compiled here when they never were), where the head
    dimension is a multiple of their vectors; else torch."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return TorchDecoder(model, sampling)
    from tailrace.vectors import WIDTH

    if model.architecture.head_dim % WIDTH:
        return TorchDecoder(model, sampling)
    from tailrace.engine.native.compiled import CompiledDecoder

    return CompiledDecoder(model, sampling, max_tokens=max_tokens)
