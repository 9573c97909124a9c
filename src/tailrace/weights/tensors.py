"""Tensors and their manifest; the size of a change between two publications."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tailrace.weights.base import DTYPE, TensorInfo, Weights, WeightSender

COMPARED = 2**16
"""Elements of each tensor that are compared, at most."""


def manifest(tensors: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """What the tensors are, in their order."""
    return tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    )


class Publisher:
    """Publishes a trainer's weights in the engines' type. `tensors`: the initial weights with their names."""

    def __init__(self, sender: WeightSender, dtype: DTYPE, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._sender, self._dtype = sender, getattr(torch, dtype)
        self._last = {name: _compared(tensor) for name, tensor in tensors}
        """Of the newest publication."""

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Weights:
        """Copy tensors to the host, one after another, and publish them, as `WeightSender.publish`."""
        host = {name: tensor.detach().to("cpu", self._dtype) for name, tensor in tensors}
        weights = self._sender.publish(host, version)
        return Weights(version, weights.location, weights.tensors, self._changed(host))

    def _changed(self, tensors: Mapping[str, Tensor]) -> float:
        """The share of weights whose bfloat16 value differs from that of the call before."""
        num_changed = 0.0
        for name, tensor in tensors.items():
            last, self._last[name] = self._last[name], _compared(tensor)
            differ = self._last[name].view(torch.int16) != last.view(torch.int16)
            num_changed += tensor.numel() * int(differ.count_nonzero()) / max(1, len(differ))
        return num_changed / max(1, sum(tensor.numel() for tensor in tensors.values()))


def _compared(tensor: Tensor) -> Tensor:
    """Elements at equal distances, on the CPU in bfloat16: [COMPARED at most]. The distance is odd, so that
    all columns of a matrix have some."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // COMPARED) | 1].to("cpu", torch.bfloat16, copy=True)
