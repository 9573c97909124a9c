"""Tensors and their manifest; the size of a change between two publications."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tailrace.weights.base import DTYPE, TensorInfo, Weights, WeightSender

CHUNK = 2**20
"""Elements that are compared at a time."""


def manifest(tensors: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """What the tensors are, in their order."""
    return tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    )


class Publisher:
    """Publishes a trainer's weights in the engines' type.

    Args:
        tensors: the initial weights with their names.
    """

    def __init__(self, sender: WeightSender, dtype: DTYPE, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._sender, self._dtype = sender, getattr(torch, dtype)
        self._last = {
            name: tensor.detach().reshape(-1).to("cpu", torch.bfloat16, copy=True) for name, tensor in tensors
        }
        """The newest publication in bfloat16, flat."""

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Weights:
        """Copy tensors to the host, one after another, and publish them, as `WeightSender.publish`."""
        host = {name: tensor.detach().to("cpu", self._dtype) for name, tensor in tensors}
        weights = self._sender.publish(host, version)
        return Weights(version, weights.location, weights.tensors, self._changed(host))

    def _changed(self, tensors: Mapping[str, Tensor]) -> float:
        """The share of weights whose bfloat16 value differs from that of the call before."""
        num = num_changed = 0
        for name, tensor in tensors.items():
            last, flat = self._last[name], tensor.reshape(-1)
            for start in range(0, len(flat), CHUNK):
                old, new = last[start : start + CHUNK], flat[start : start + CHUNK]
                rounded = new.to(torch.bfloat16).view(torch.int16)
                num_changed += int((rounded != old.view(torch.int16)).count_nonzero())
                old.view(torch.int16).copy_(rounded)
            num += tensor.numel()
        return num_changed / max(1, num)
