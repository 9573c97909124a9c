"""Which layers of an architecture several processes can divide, without torch.

transformers names a style for each layer of an architecture (`base_model_tp_plan` of its config). The names
are those of version 5.19; older plans have others, and other gradients.
"""

from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError
from tailrace.model_folder import read_config

KEY = "trainer.tensor_parallel"
SINCE = (5, 19)
"""The first version of transformers whose plans are followed."""
STYLES = {
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
}
"""Styles that are followed. Others divide experts, latent attention or the sequence."""


def check_tensor_parallel(model: Path, num: int) -> None:
    """Check that `num` processes can divide the layers of a Hugging Face folder. Raises a ConfigError if
    transformers is too old or has no plan for the architecture that is followed here, or a size is not
    divisible."""
    if num == 1:
        return
    found = tuple(int(part) for part in version("transformers").split(".")[:2])
    if found < SINCE:
        problem = f"transformers {version('transformers')} has plans of another form"
        raise ConfigError(KEY, num, problem, "install transformers 5.19 or newer, or set it to 1")
    from transformers import CONFIG_MAPPING  # it imports torch

    config = read_config(model)
    model_type = config.get("model_type")
    try:
        plan = CONFIG_MAPPING[model_type].base_model_tp_plan
    except KeyError:
        plan = None
    of, remedy = f"an architecture of type {model_type!r}", "set it to 1, and trainer.ranks to more"
    if not plan:
        raise ConfigError(KEY, num, f"transformers has no plan for {of}", remedy)
    if others := sorted({*plan.values()} - STYLES):
        problem = f"{of} has layers that are divided in ways that are not tested"
        raise ConfigError(KEY, num, f"{problem}: {', '.join(others)}", remedy)
    sizes = {name: config[name] for name in _sizes(config)}
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % num]:
        common = gcd(*sizes.values())
        choices = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
        raise ConfigError(KEY, num, f"it does not divide {', '.join(wrong)}", f"choose from {choices}")
    vocabulary = config.get("vocab_size", num)
    if -(-vocabulary // num) * (num - 1) >= vocabulary:
        problem = f"vocab_size = {vocabulary} leaves a process without a part"
        raise ConfigError(KEY, num, problem, "choose a smaller one")


def _sizes(config: dict[str, Any]) -> list[str]:
    """Keys of the sizes that are divided."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return [name for name in names if isinstance(config.get(name), int)]
