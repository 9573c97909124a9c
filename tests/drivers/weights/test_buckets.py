"""Buckets: whatever the tensors are, they arrive as they were, in messages of bounded size."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tailrace.contracts.weights import TensorInfo
from tailrace.drivers.weights.process_group import Bucket, buckets, pack, unpack
from tailrace.drivers.weights.tensors import manifest

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from([torch.float32, torch.bfloat16])), max_size=12)


def num_bytes(bucket: Bucket) -> int:
    return sum(info.num_bytes for info in bucket)


def make(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{n}": torch.randn(shape, generator=generator).to(dtype) for n, (shape, dtype) in enumerate(kinds)
    }


@given(TENSORS, st.integers(1, 400))
def test_what_is_unpacked_is_what_was_packed(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    tensors = make(kinds)
    divided = buckets(manifest(tensors), bucket_bytes)
    got: dict[str, Tensor] = {}
    for bucket in divided:
        data = pack(tensors, bucket)
        assert (data.dtype, len(data)) == (torch.uint8, num_bytes(bucket))
        got |= unpack(data, bucket)
    assert [info for bucket in divided for info in bucket] == list(manifest(got)) == list(manifest(tensors))
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


@given(TENSORS, st.integers(1, 400))
def test_a_bucket_is_full_and_not_larger_than_allowed_unless_it_has_one_tensor(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    divided = buckets(manifest(make(kinds)), bucket_bytes)
    for bucket in divided:
        assert num_bytes(bucket) <= bucket_bytes or num_bytes(bucket) == max(i.num_bytes for i in bucket)
    for bucket, following in pairwise(divided):
        assert num_bytes(bucket) + following[0].num_bytes > bucket_bytes


def test_the_layout_is_bytes_in_the_order_of_the_manifest_without_padding() -> None:
    tensors = {"b": torch.tensor([1.0], dtype=torch.bfloat16), "a": torch.tensor([[1.0, -2.0]])}
    (bucket,) = buckets(manifest(tensors), 100)
    assert bucket == [TensorInfo("b", (1,), "bfloat16"), TensorInfo("a", (1, 2), "float32")]
    assert bytes(pack(tensors, bucket).tolist()).hex(" ", 2) == "803f 0000 803f 0000 00c0"
