"""Weights of a model folder that LoRA adapts, and the tensors of the adapter, without torch and peft.

Tensors are named as in peft's files, without peft's prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import TensorInfo
from tailrace.errors import ConfigError, say
from tailrace.importing import install
from tailrace.model_folder import NOT_OF_TEXT, draft_tensors, model_name, read_config, tensor_shapes

_WEIGHT = ".weight"
_NOT_ADAPTED = re.compile(r"(^|\.)(\w*embed\w*|w[tp]e|lm_head|gate|router(\.layer)?)\.weight$")
"""Embeddings, heads, and routers, some of which are no linear layers of transformers."""
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
"""An expert's layer in files. transformers keeps all experts of a block in one tensor, which is no layer."""
_KEY = "trainer.lora"


def adapted_modules(model: Path, lora: LoraSettings) -> dict[str, tuple[int, int]]:
    """Return the adapted layers of a Hugging Face folder: name to (outputs, inputs). Layers with the name of
    an expert's are none: peft would look for them in the experts. Raises a ConfigError if a file is missing
    or damaged, or a name of `target_modules` is of no linear layer, or of an expert's."""
    drafts, experts = set(draft_tensors(model)), expert_layers(model)
    step = -1 if read_config(model).get("model_type") in ("gpt2", "openai-gpt") else 1  # Conv1D: (in, out)
    linear = {
        name.removesuffix(_WEIGHT): (shape[::step][0], shape[::step][1])
        for name, shape in tensor_shapes(model).items()
        if name.endswith(_WEIGHT)
        and len(shape) == 2
        and name.split(".")[-2] not in experts
        and not (name in drafts or _NOT_ADAPTED.search(name) or NOT_OF_TEXT.search(name))
    }
    if lora.target_modules == "all-linear":
        return linear
    kinds = sorted({_kind(name) for name in linear})
    if unknown := [name for name in lora.target_modules if name not in kinds]:
        of = "model, but for its experts, which are no layers of their own," if experts else "model"
        problem = f"{', '.join(unknown)}: no linear layer of the {of} has this name"
        key = f"{_KEY}.target_modules"
        raise ConfigError(key, str(list(lora.target_modules)), problem, f"choose from {', '.join(kinds)}")
    return {name: shape for name, shape in linear.items() if _kind(name) in lora.target_modules}


def expert_layers(model: Path) -> list[str]:
    """Return the names of the layers of experts. Raises as `tensor_shapes`."""
    return sorted({found[1] for name in tensor_shapes(model) if (found := _EXPERT.search(name))})


def adapter_parameters(model: Path, lora: LoraSettings | None) -> int:
    """Return the parameters of an adapter. Raises as `adapted_modules`."""
    return sum(map(sum, adapted_modules(model, lora).values())) * lora.rank if lora else 0


def check_lora(model: Path, lora: LoraSettings) -> None:
    """Check what can be checked without loading the model. Raises a ConfigError if peft is not installed, or
    a layer does not exist."""
    if find_spec("peft") is None:
        raise ConfigError(f"{_KEY}.rank", lora.rank, "it needs peft, which is not installed", install("lora"))
    if lora.versions > 1 and lora.publish != "adapter":
        problem, remedy = "merged weights replace each other", 'set it to 1, or publish = "adapter"'
        raise ConfigError(f"{_KEY}.versions", lora.versions, problem, remedy)
    if not adapted_modules(model, lora):
        problem = "the model has no linear layer of these names"
        raise ConfigError(f"{_KEY}.target_modules", str(lora.target_modules), problem, "name at least one")
    if experts := expert_layers(model) if lora.target_modules == "all-linear" else []:
        say(f"the adapter leaves the experts out, and other layers of their names: {', '.join(experts)}")


def peft_config(model: Path, lora: LoraSettings) -> dict[str, object]:
    """The config file of a published adapter, as peft and inference servers read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name(model),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(adapted_modules(model, lora)),
        "bias": "none",
        "inference_mode": True,
    }


def adapter_tensors(model: Path, lora: LoraSettings) -> tuple[TensorInfo, ...]:
    """Return the tensors of an adapter's publication. They are float32, whatever the type of the engine.
    Raises as `adapted_modules`."""
    tensors: list[TensorInfo] = []
    for name, (outputs, inputs) in adapted_modules(model, lora).items():
        tensors.append(TensorInfo(f"{name}.lora_A.weight", (lora.rank, inputs), "float32"))
        tensors.append(TensorInfo(f"{name}.lora_B.weight", (outputs, lora.rank), "float32"))
    return tuple(tensors)


def _kind(module: str) -> str:
    return module.rpartition(".")[2]
