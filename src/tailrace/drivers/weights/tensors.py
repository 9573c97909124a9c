"""Tensors and their manifest; the size of a change between two publications."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tailrace.contracts.weights import DTYPE, Probe, TensorInfo, Weights, WeightSender

COMPARED = 2**16
"""Elements of each tensor that are compared with those of the last publication, at most."""
SUMMED = 2**13
"""Elements of each tensor that a checksum covers, at most. A step that changes one in a thousand of them
changes the checksum but for one case in 3,000."""


def manifest(tensors: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """Return name, shape and type of each tensor, in their order."""
    return tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    )


class Publisher:
    """Publishes a trainer's weights in the engines' type. `tensors`: the initial weights with their names."""

    def __init__(self, sender: WeightSender, dtype: DTYPE, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._sender, self._dtype = sender, getattr(torch, dtype)
        self._last = {name: _compared(tensor) for name, tensor in tensors}
        """Compared elements of the newest publication."""

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, probe: Probe | None = None
    ) -> Weights:
        """Copy tensors to the sender's device, one after another, and store them as a version
        (`WeightSender.store`). A probe gets their checksums."""
        whole = {name: tensor.detach().to(self._sender.device, self._dtype) for name, tensor in tensors}
        weights = self._sender.store(whole, version)
        if probe and probe.expected:
            probe = replace(probe, checksums=checksums(whole))
        return Weights(version, weights.location, weights.tensors, self._changed(whole), probe)

    def _changed(self, tensors: Mapping[str, Tensor]) -> float:
        """The share of weights whose bfloat16 value differs from that of the call before."""
        num_changed = 0.0
        for name, tensor in tensors.items():
            last, self._last[name] = self._last[name], _compared(tensor)
            differ = self._last[name].view(torch.int16) != last.view(torch.int16)
            num_changed += tensor.numel() * int(differ.count_nonzero()) / max(1, len(differ))
        return num_changed / max(1, sum(tensor.numel() for tensor in tensors.values()))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bits of each tensor and of their places, whatever its layout and device."""
    sums = {name: _checksum(tensor.detach()) for name, tensor in tensors.items()}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _checksum(tensor: Tensor) -> Tensor:
    size = tensor.numel()
    places = torch.arange(0, size, _distance(size, SUMMED), device=tensor.device)
    elements = tensor[torch.unravel_index(places, tensor.shape)]
    bits = elements.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return (bits.long() * (2 * places + 1)).sum()  # it wraps


def _compared(tensor: Tensor) -> Tensor:
    """Elements at equal distances, on the CPU in bfloat16: [COMPARED at most]."""
    flat = tensor.detach().reshape(-1)
    return flat[:: _distance(len(flat), COMPARED)].to("cpu", torch.bfloat16, copy=True)


def _distance(size: int, most: int) -> int:
    """Distance of the sampled elements of a tensor. It is odd, so that all columns of a matrix have some."""
    return -(-size // most) | 1
