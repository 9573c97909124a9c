"""What a trainer publishes: host copies in the engines' type, and how much of them has changed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tailrace.contracts.weights import DTYPE, TensorInfo, new_link
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.drivers.weights.tensors import COMPARED, Publisher
from tailrace.drivers.weights.transports import WeightReceiver


@pytest.fixture
def sender(tmp_path: Path) -> FilesystemSender:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return FilesystemSender(tmp_path / "weights", tmp_path / "model", 10**9)


def weights(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((3, 5), value).T, "b": torch.full((7,), -value)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_published_in_the_type_of_the_engines(sender: FilesystemSender, dtype: DTYPE) -> None:
    published = Publisher(sender, dtype, weights(1.0).items()).publish(weights(1.001).items(), 1)
    assert published.tensors == (TensorInfo("a", (5, 3), dtype), TensorInfo("b", (7,), dtype))
    got = WeightReceiver().receive(published, new_link("engine-0"))
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights(1.001).items()}
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_has_changed_if_its_bfloat16_value_has(sender: FilesystemSender, dtype: DTYPE) -> None:
    current = weights(1.0)
    publisher = Publisher(sender, dtype, current.items())
    assert publisher.publish(current.items(), 1).changed == 0.0
    current["a"][0, :2] += 1e-5  # less than half of a step of bfloat16
    assert publisher.publish(current.items(), 2).changed == 0.0
    current["a"][1, 2] += 0.1
    current["b"][:3] = 0.0
    assert publisher.publish(current.items(), 3).changed == 4 / 22
    assert publisher.publish(current.items(), 4).changed == 0.0
    current["b"][:2] = -0.0
    current["b"][6] = torch.nan
    assert publisher.publish(current.items(), 5).changed == 3 / 22
    assert publisher.publish(current.items(), 6).changed == 0.0


def test_of_a_large_tensor_a_sample_is_compared_that_has_all_columns(sender: FilesystemSender) -> None:
    """A quarter of the columns of a matrix changes, and a small tensor whose elements all count."""
    current = {"a": torch.zeros(1024, 512), "b": torch.zeros(COMPARED)}
    publisher = Publisher(sender, "float32", current.items())
    current["a"][:, :128] = 1.0
    current["b"][:100] = 1.0
    changed = publisher.publish(current.items(), 1).changed
    assert changed == pytest.approx((1024 * 128 + 100) / (1024 * 512 + COMPARED), rel=1e-3)
    current["a"][0, 0] = 2.0  # one element of nine is compared
    current["b"][0] = 2.0
    assert publisher.publish(current.items(), 2).changed == pytest.approx(10 / (9 * COMPARED), abs=1e-5)
    assert max(len(last) for last in publisher._last.values()) <= COMPARED
