"""The tensors that a publication must have. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from tailrace.contracts.weights import DTYPE, TensorInfo
from tailrace.errors import WeightsRefused
from tailrace.model_folder import COMPUTED, NOT_OF_TEXT, draft_tensors, read_config, tensor_shapes

_NAMED = 3
"""Tensors that an error names, at most, of each kind of defect."""


def expected_tensors(model: Path, dtype: DTYPE) -> tuple[TensorInfo, ...]:
    """Return the tensors that a publication must have, from the headers of the served model's files. Raises a
    ConfigError if the folder is incomplete or damaged."""
    shapes, left = tensor_shapes(model), set(draft_tensors(model))
    if read_config(model).get("tie_word_embeddings"):
        left.add("lm_head.weight")
    left |= {name for name in shapes if COMPUTED.search(name)}
    return tuple(TensorInfo(name, shape, dtype) for name, shape in shapes.items() if name not in left)


def check_tensors(offered: Iterable[TensorInfo], expected: Iterable[TensorInfo]) -> None:
    """Check that the offered tensors are the expected ones, in any order. Raises a WeightsRefused that names
    those that are missing, extra, of another shape or of another type."""
    have, want = ({tensor.name: tensor for tensor in tensors} for tensors in (offered, expected))
    both = [(have[name], want[name]) for name in want if name in have]
    defects = {
        "missing": [name for name in want if name not in have and not NOT_OF_TEXT.search(name)],
        "not in the model": [name for name in have if name not in want],
        "of another shape": [
            f"{a.name} {list(a.shape)} in place of {list(b.shape)}" for a, b in both if a.shape != b.shape
        ],
        "of another type": [
            f"{a.name} {a.dtype} in place of {b.dtype}" for a, b in both if a.dtype != b.dtype
        ],
    }
    found = [
        f"{len(names)} {defect}: {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
        for defect, names in defects.items()
        if names
    ]
    if found:
        raise WeightsRefused(f"the published weights are not those of the model; {'; '.join(found)}")
