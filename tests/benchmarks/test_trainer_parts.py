"""Where the time of a step goes: the part of an operation, and all parts of a small step."""

from pathlib import Path

import pytest

from common import save_model
from trainer import HOST, WORKLOADS, part, profiled

WEIGHTS = {(100, 8), (16, 8)}


@pytest.mark.parametrize(
    ("name", "shapes", "wanted"),
    [
        ("aten::mm", [[50, 8], [8, 16]], "linear layers"),
        ("aten::mm", [[50, 8], [8, 100]], "logits"),
        ("aten::_log_softmax", [[50, 100]], "softmax over the vocabulary"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[1, 2, 50, 4]], "attention"),
        ("aten::copy_", [[16, 8], [16, 8]], "casts of weights and their gradients"),
        ("aten::copy_", [[50, 8], [50, 8]], "norms, rotations, activations, residuals"),
        ("aten::add_", [[100, 8], [100, 8]], "sums of gradients"),
        ("aten::div_", [[100, 8], []], "optimizer"),
        ("aten::div_", [[50, 100], []], "softmax over the vocabulary"),
        ("aten::_fused_adamw_", [], "optimizer"),
        ("autograd::engine::evaluate_function: MulBackward0", [], HOST),
    ],
)
def test_an_operation_belongs_to_a_part(name: str, shapes: list[list[int]], wanted: str) -> None:
    assert part(name, shapes, 100, WEIGHTS) == wanted


@pytest.mark.parametrize("length", [0, 96])
def test_the_parts_of_a_step_in_bfloat16_are_all_found(tmp_path: Path, length: int) -> None:
    shape, _ = WORKLOADS["small"]
    save_model(tmp_path, **shape)
    found = profiled(tmp_path, "bfloat16", length)
    wanted = {"linear layers", "logits", "attention", "optimizer", "casts of weights and their gradients"}
    wanted |= {"norms, rotations, activations, residuals", "sums of gradients", HOST}
    assert wanted <= found.keys() and min(found.values()) >= 0
