"""Layers that live in host memory and are copied to the device as the forward pass reaches them.

The copy of a layer runs on a stream of its own, while the layer before it computes (RollPacker 4.3). The
hooks of accelerate copy a layer when it is called, so its transfer and its computation take turns.

On a CPU the host memory is the model's files, which are read layer by layer; nothing overlaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tailrace.reward.judge_memory import IN_TRANSIT, kept_layers

ALIGNMENT = 256
"""Bytes to which tensors are aligned in a buffer."""

Reader = Callable[[int, Mapping[str, Tensor]], None]
"""Copies the tensors of layer i, by their names in the layer, into given ones."""


@dataclass
class _Place:
    """Memory of the device that holds a layer.

    Args:
        layer: what is in it; None: nothing that is still needed.
        free: the computation that used it last.
        arrived: the copy into it.
    """

    bytes: Tensor
    layer: int | None = None
    free: Any = None
    arrived: Any = None


class StreamedLayers:
    """The layers of a model, of which some are resident on the device.

    Args:
        layers: called one after another in each forward pass. Their parameters are on the meta device or not
            initialised.
        read: reads a layer from the model's files.
    """

    def __init__(self, layers: Sequence[nn.Module], read: Reader, device: torch.device, dtype: torch.dtype):
        self._layers, self._read, self._device, self._dtype = layers, read, device, dtype
        self._module = torch.get_device_module(device)
        self._copies = self._module.Stream()
        self._parameters = [dict(layer.named_parameters()) for layer in layers]
        self._shapes = [{name: p.shape for name, p in each.items()} for each in self._parameters]
        self._sizes = [self._size(shapes) for shapes in self._shapes]
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._slots = self._new_slots()
        self._kept: dict[int, _Place] = {}
        self._host = [] if device.type == "cpu" else self._read_all()
        for i, layer in enumerate(layers):
            self._detach(i)
            layer.register_forward_pre_hook(partial(self._before, i))
            layer.register_forward_hook(partial(self._after, i))

    def keep(self, num: int) -> None:
        """Let so many layers be resident from now on."""
        n = len(self._layers)
        kept = kept_layers(num, n)
        for i in self._kept.keys() - kept:
            self._detach(i)
            del self._kept[i]
        if num == n:
            self._slots = []
        elif not self._slots:
            self._slots = self._new_slots()
        for i in sorted(kept - self._kept.keys()):
            self._kept[i] = place = _Place(self._empty(self._sizes[i]))
            place.free = self._module.current_stream().record_event()
            self._copy(i, place)

    def _before(self, i: int, *_: object) -> None:
        place = self._kept.get(i) or self._fetch(i)
        self._module.current_stream().wait_event(place.arrived)
        for name, view in self._views(i, place.bytes).items():
            self._parameters[i][name].data = view
        following = next((j for j in range(i + 1, len(self._layers)) if j not in self._kept), None)
        if following is not None:
            self._fetch(following, spare=place)

    def _after(self, i: int, *_: object) -> None:
        if i in self._kept:
            return
        self._detach(i)
        for place in self._slots:
            if place.layer == i:
                place.layer, place.free = None, self._module.current_stream().record_event()

    def _fetch(self, i: int, spare: _Place | None = None) -> _Place:
        """Begin to copy a layer into a slot, unless it is there already.

        Args:
            spare: a slot that is in use.
        """
        there = next((place for place in self._slots if place.layer == i), None)
        if there is None:
            there = next(place for place in self._slots if place is not spare)
            self._copy(i, there)
        return there

    def _copy(self, i: int, place: _Place) -> None:
        if place.free is not None:
            self._copies.wait_event(place.free)
        with self._module.stream(self._copies):
            if self._host:
                place.bytes[: self._sizes[i]].copy_(self._host[i], non_blocking=True)
            else:
                self._read(i, self._views(i, place.bytes))
            place.layer, place.arrived = i, self._copies.record_event()

    def _detach(self, i: int) -> None:
        for parameter in self._parameters[i].values():
            parameter.data = self._nothing

    def _views(self, i: int, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a layer in a buffer."""
        views, start = {}, 0
        for name, shape in self._shapes[i].items():
            size = shape.numel() * self._dtype.itemsize
            views[name] = buffer[start : start + size].view(self._dtype).view(shape)
            start += _aligned(size)
        return views

    def _size(self, shapes: Mapping[str, torch.Size]) -> int:
        return sum(_aligned(shape.numel() * self._dtype.itemsize) for shape in shapes.values())

    def _new_slots(self) -> list[_Place]:
        return [_Place(self._empty(max(self._sizes))) for _ in range(IN_TRANSIT)]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _read_all(self) -> list[Tensor]:
        """Read the layers into one pinned buffer. What torch pins itself has the size of a power of two."""
        buffer = torch.empty(sum(self._sizes), dtype=torch.uint8)
        torch.cuda.check_error(
            int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))  # type: ignore[no-untyped-call]
        )
        hosts = list(buffer.split_with_sizes(self._sizes))
        for i, host in enumerate(hosts):
            self._read(i, self._views(i, host))
        return hosts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
