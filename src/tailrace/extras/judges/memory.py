"""How many layers of a judge stay on its device. Imports no torch.

RollPacker (4.3) lets the judge share a device with the model that is trained. It keeps most layers of the
judge in host memory, and adjusts their number to the length of the sequences. Here a budget holds, at the
same time, what is in no layer, the activations of a batch, the resident layers and two layers in transit: one
that computes and one that arrives.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.contracts.memory import MIB, TRANSFORMERS_BYTES, ModelShape, ProcessMemory, gib
from tailrace.errors import ConfigError
from tailrace.extras.judges.settings import LocalJudgeSettings
from tailrace.model_folder import check_files, read_config
from tailrace.types import ITEM_BYTES

IN_TRANSIT = 2
"""Layers on the device that do not stay there."""
REWARD_MODEL, LANGUAGE_MODEL = "ForSequenceClassification", "ForCausalLM"
"""Endings of the architectures in config.json."""


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The rule that divides the memory of a judge."""

    total_bytes: int | None
    """Bytes for everything; None: without limit."""
    num_layers: int
    layer_bytes: int
    """Bytes of the largest layer."""
    outside_bytes: int
    """Bytes of the parts outside of layers: embedding, last norm, head."""
    token_bytes: int
    """Bytes of the activations of a token."""

    @classmethod
    def of(cls, shape: ModelShape, settings: LocalJudgeSettings) -> "LayerBudget":
        size = ITEM_BYTES[settings.dtype]
        wide = 4 * shape.hidden_size + 3 * shape.mlp_size + 2 * (shape.query_size + shape.kv_size)
        return cls(
            total_bytes=settings.memory_mib * MIB if settings.memory_mib else None,
            num_layers=shape.num_layers,
            layer_bytes=size * shape.block_parameters,
            outside_bytes=size * shape.outside_parameters,
            token_bytes=size * wide + 8 * shape.hidden_size,  # norms compute in float32
        )

    def resident_layers(self, num_tokens: int) -> int:
        """Return the number of layers that stay on the device beside a batch of so many tokens. Raises a
        ValueError if the batch does not fit."""
        if self.total_bytes is None:
            return self.num_layers
        room = self.total_bytes - self.outside_bytes - num_tokens * self.token_bytes
        fitting = room // self.layer_bytes
        if fitting >= self.num_layers:
            return self.num_layers
        if fitting < IN_TRANSIT:
            least = self.outside_bytes + num_tokens * self.token_bytes + IN_TRANSIT * self.layer_bytes
            raise ValueError(f"{num_tokens} tokens need {gib(least)}")
        return fitting - IN_TRANSIT

    def most_bytes(self, num_tokens: int) -> int:
        """Return the memory that is used at most."""
        whole = self.outside_bytes + num_tokens * self.token_bytes + self.num_layers * self.layer_bytes
        return whole if self.total_bytes is None else min(whole, self.total_bytes)


def kept_layers(num: int, num_layers: int) -> set[int]:
    """Return which layers are resident: evenly spread ones, so that the copy of each other layer has time."""
    return {i for i in range(num_layers) if (i + 1) * num // num_layers > i * num // num_layers}


def batches(numbers: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide texts, whose `lengths` are given by number, into batches of similar lengths and of at most
    `max_tokens`, with padding to the longest text."""
    found: list[list[int]] = []
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= max_tokens:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def judge_memory(settings: LocalJudgeSettings) -> ProcessMemory:
    """Estimate the memory of the process of a judge whose folder was checked. On a CPU the layers in host
    memory are pages of its files, which the kernel can take back."""
    shape = ModelShape.read(settings.path)
    on_device = {"layers and activations": LayerBudget.of(shape, settings).most_bytes(settings.max_tokens)}
    host = {"process": TRANSFORMERS_BYTES}
    if settings.device != "cpu":
        host["layers"] = ITEM_BYTES[settings.dtype] * shape.num_layers * shape.block_parameters
    return ProcessMemory(f"judge {settings.name}", settings.device, on_device, host)


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a reward model, not of a language model."""
    return _architecture(config).endswith(REWARD_MODEL)


def check_folder(settings: LocalJudgeSettings) -> None:
    """Check a judge's folder and memory before anything starts. Raises a ConfigError if it is neither a
    reward model nor a causal language model, or does not fit its memory."""
    key, path = "reward.judges.path", str(settings.path)
    try:
        check_files(settings.path)
        shape = ModelShape.read(settings.path)
    except ConfigError as why:
        raise ConfigError(key, path, why.problem, why.remedy) from None
    config = read_config(settings.path)
    architecture = _architecture(config)
    if not architecture.endswith((REWARD_MODEL, LANGUAGE_MODEL)):
        problem = f"a {architecture or 'model without an architecture'} cannot judge"
        raise ConfigError(key, path, problem, f"name a model *{REWARD_MODEL} or *{LANGUAGE_MODEL}")
    if is_reward_model(config):
        if len(config.get("id2label") or (0, 1)) != 1:
            raise ConfigError(key, path, "it has several outputs", "name a reward model with one output")
        if not settings.labels:
            raise ConfigError("reward.judges.labels", [], "a reward model writes no answer", "remove it")
    elif settings.template is None:
        raise ConfigError("reward.judges.template", None, "a language model needs a question", "set it")
    try:
        LayerBudget.of(shape, settings).resident_layers(settings.max_tokens)
    except ValueError as why:
        remedy = "raise it, or lower reward.judges.max_tokens"
        raise ConfigError("reward.judges.memory_mib", settings.memory_mib, str(why), remedy) from None


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])
