"""State that leaves its device while engines use the memory, and comes back bit for bit.

Only the storages of tensors are emptied, and filled again. Parameters, gradients, moments, their views and
FSDP's shards stay the objects that they are.

A part waits in pinned memory of the host, or in a file (`OffloadSettings`). The file has no name, so that it
goes with its process. It is written through its descriptor and mapped afterwards: pages that are not touched
are no resident memory of the process, and the kernel may write them out. On a CPU this is the only way to
give memory back: a region of /dev/shm would be memory of the same host.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from tailrace.contracts.trainer import Place
from tailrace.drivers.trainer.distributed import local

COPIED_BYTES = 2**26
"""Copied at once on the way to a file."""


class Offloaded:
    """One part of a trainer's state: on its device, or away."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        """The empty storages, and the bytes of each where it waits: [num_bytes] uint8."""

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors away, and free their memory. What is in the place already stays."""
        if self._place == "device" or self._away:
            return
        for storage in _storages(tensors):
            if self._place == "host" and storage.device.type == "cpu":
                continue
            data = _data(storage)
            self._away.append((storage, _pinned(data) if self._place == "host" else _in_file(data)))
            storage.resize_(0)

    def come_back(self) -> None:
        """Move all back to where they were. Raises a RuntimeError if there is no memory; the rest stays."""
        while self._away:
            storage, kept = self._away[-1]
            storage.resize_(kept.numel())
            _data(storage).copy_(kept)
            self._away.pop()

    @contextmanager
    def added_to(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Inside the block backward passes add the gradients of parameters to their sums where these are.
        The device holds those of one parameter, or of one sharded block."""
        if not self._away:
            yield
            return
        kept = {storage._cdata: data for storage, data in self._away}
        sums = {each: each.grad for each in parameters if each.grad is not None}

        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            new, total = local(parameter.grad), local(sums[parameter])
            data = kept[total.untyped_storage()._cdata].view(total.dtype)
            data.as_strided(total.shape, total.stride()).add_(new.to("cpu"))
            parameter.grad = None

        hooks = [each.register_post_accumulate_grad_hook(add) for each in sums]  # type: ignore[no-untyped-call]
        try:
            for each in sums:
                each.grad = None
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for each, total in sums.items():
                each.grad = total


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Each storage once. Those of a sharded tensor are this rank's."""
    found = {}
    for tensor in tensors:
        own = local(tensor.detach())
        if not own.untyped_storage().resizable():  # it is that of a weight file
            tensor.data = own = own.clone()
        storage = own.untyped_storage()
        found[storage.data_ptr()] = storage
    return (storage for storage in found.values() if storage.nbytes())


def _data(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(data: Tensor) -> Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)


def _in_file(data: Tensor) -> Tensor:
    """A copy in a file of $TMPDIR. Raises an OSError if the disk is full."""
    with tempfile.TemporaryFile() as file:
        for part in torch.split(data, COPIED_BYTES):  # torch shrinks no storage that numpy has seen
            part.to("cpu", copy=True).numpy().tofile(file)
        return torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=len(data), dtype=data.dtype)
