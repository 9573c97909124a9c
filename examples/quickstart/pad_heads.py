"""Makes the quickstart's model for vLLM on a CPU: python examples/quickstart/pad_heads.py

vLLM's attention on a CPU has kernels for heads of 32 numbers, and the model has heads of 24. This writes the
same model with heads of 32: it computes the same function and learns in the same way. Rows and columns of
zeros are added, which get no gradient, since each is multiplied by zeros only.

- A rotary embedding turns pairs (i, i + head_dim / 2) with the frequency theta^(-2 i / head_dim). The pairs
  keep their frequencies if theta becomes theta^(32 / 24); the pairs that are added come last.
- The norm of queries and keys divides by the root of the mean square over a head, which zeros make smaller by
  24 / 32. Scores are divided by the root of head_dim. Together the keys' gains need the factor
  sqrt(24 / 32), and the queries' none.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent
OLD, NEW = 24, 32


def padded(weight: Tensor, dim: int, *, halves: bool) -> Tensor:
    """Widen each head of a dimension of a tensor with zeros.

    Args:
        halves: at the end of each half of a head, as a rotary embedding needs it; else at its end.
    """
    num_parts, width = (2, OLD // 2) if halves else (1, OLD)
    heads = weight.movedim(dim, 0)
    split = heads.reshape(-1, num_parts, width, *heads.shape[1:])
    wide = split.new_zeros(split.shape[0], num_parts, NEW // num_parts, *heads.shape[1:])
    wide[:, :, :width] = split
    return wide.reshape(-1, *heads.shape[1:]).movedim(0, dim).contiguous()


def main() -> None:
    source, target = FOLDER / "model", FOLDER / "model-32"
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "q_norm", "k_norm"):
            tensors[name] = padded(weight, 0, halves=True)
        elif kind in ("v_proj", "o_proj"):
            tensors[name] = padded(weight, 0 if kind == "v_proj" else 1, halves=False)
        if kind == "k_norm":
            tensors[name] = tensors[name].float() * math.sqrt(OLD / NEW)  # not rounded to bfloat16
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["head_dim"] = NEW
    config["rope_parameters"]["rope_theta"] **= NEW / OLD
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.no_grad():
        main()
