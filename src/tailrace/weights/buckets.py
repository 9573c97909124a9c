"""Buckets: tensors packed into contiguous bytes, each bucket one message.

A bucket is the bytes of its tensors one after another, in the order of the manifest, each tensor contiguous
and in native byte order, without padding and without a header. A tensor joins the bucket before it unless
the bucket would then be larger than `bucket_bytes`; so a larger tensor is a bucket of its own. Sender and
receiver compute the same buckets from the manifest.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tailrace.weights.base import TensorInfo

Bucket = Sequence[TensorInfo]


def buckets(tensors: Iterable[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Divide a manifest into buckets."""
    divided: list[list[TensorInfo]] = []
    room = -1
    for tensor in tensors:
        if tensor.num_bytes > room:
            divided.append([])
            room = bucket_bytes
        divided[-1].append(tensor)
        room -= tensor.num_bytes
    return divided


def num_bytes(bucket: Bucket) -> int:
    """Size of a bucket."""
    return sum(tensor.num_bytes for tensor in bucket)


def pack(tensors: Mapping[str, Tensor], bucket: Bucket) -> Tensor:
    """Copy the tensors of a bucket: [num_bytes], uint8."""
    return torch.cat([tensors[info.name].contiguous().reshape(-1).view(torch.uint8) for info in bucket])


def unpack(data: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """The tensors of a bucket by name. They are views of the data where its alignment allows it.

    Args:
        data: [num_bytes], uint8.
    """
    tensors: dict[str, Tensor] = {}
    sizes = [info.num_bytes for info in bucket]
    for info, part in zip(bucket, data.split_with_sizes(sizes), strict=True):
        dtype: torch.dtype = getattr(torch, info.dtype)
        aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        tensors[info.name] = aligned.view(dtype).view(info.shape)
    return tensors
