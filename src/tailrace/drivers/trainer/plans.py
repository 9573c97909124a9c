"""Which layers of an architecture several processes can divide, without torch.

transformers names a style for each layer of an architecture (`base_model_tp_plan` of its config). The names
are those of version 5.19; older plans have others, and other gradients.
"""

import ast
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from math import gcd
from pathlib import Path

from tailrace.errors import ConfigError
from tailrace.model_folder import read_config

KEY = "trainer.tensor_parallel"
SINCE = (5, 19)
"""The first version of transformers whose plans are followed."""
PACKED, PACKED_SINCE = "packed_colwise", (2, 13)
"""The style of experts' matrices that are packed in one tensor, and torch's version: 2.11 gathers none whose
first dimension is sharded, too."""
STYLES = {
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    PACKED,
    "moe_tp_experts",
}
"""Styles that are followed. Others divide latent attention or the sequence."""
OF_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", *OF_EXPERTS)
"""Keys of the sizes that are divided."""


def check_tensor_parallel(model: Path, num: int) -> None:
    """Check that `num` processes can divide the layers of a Hugging Face folder. Raises a ConfigError if
    transformers or torch is too old, transformers has no plan for the architecture that is followed here, or
    a size is not divisible."""
    if num == 1:
        return
    if _release("transformers") < SINCE:
        problem = f"transformers {version('transformers')} has plans of another form"
        raise ConfigError(KEY, num, problem, "install transformers 5.19 or newer, or set it to 1")
    config = read_config(model)
    model_type = config.get("model_type")
    plan = plan_of(model_type)
    of, remedy = f"an architecture of type {model_type!r}", "set it to 1, and trainer.ranks to more"
    if not plan:
        raise ConfigError(KEY, num, f"transformers has no plan for {of}", remedy)
    if others := sorted({*plan.values()} - STYLES):
        problem = f"{of} has layers that are divided in ways that are not tested"
        raise ConfigError(KEY, num, f"{problem}: {', '.join(others)}", remedy)
    if PACKED in plan.values() and _release("torch") < PACKED_SINCE:
        problem = f"torch {version('torch')} does not gather the packed matrices of experts"
        raise ConfigError(KEY, num, problem, "install torch 2.13 or newer, or set it to 1")
    sizes = {name: config[name] for name in SIZES if isinstance(config.get(name), int)}
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % num]:
        common = gcd(*sizes.values())
        choices = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
        raise ConfigError(KEY, num, f"it does not divide {', '.join(wrong)}", f"choose from {choices}")
    vocabulary = config.get("vocab_size", num)
    if -(-vocabulary // num) * (num - 1) >= vocabulary:
        problem = f"vocab_size = {vocabulary} leaves a process without a part"
        raise ConfigError(KEY, num, problem, "choose a smaller one")


def plan_of(model_type: object) -> dict[str, str] | None:
    """Return the style of each layer that transformers has for an architecture; None: it has none, or
    computes it. It is read from the source: an import takes seconds, and brings torch to the controller."""
    package = find_spec("transformers")
    assert package and package.origin
    for path in sorted(Path(package.origin).parent.glob("models/*/configuration_*.py")):
        text = path.read_text(encoding="utf-8")
        if f'model_type = "{model_type}"' not in text:
            continue
        for node in ast.parse(text).body:
            own = node.body if isinstance(node, ast.ClassDef) else []
            values = {
                ast.unparse(each.targets[0]): each.value for each in own if isinstance(each, ast.Assign)
            }
            with suppress(KeyError, ValueError):
                if ast.literal_eval(values["model_type"]) == model_type:
                    plan: dict[str, str] = ast.literal_eval(values["base_model_tp_plan"])
                    return plan
    return None


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])
