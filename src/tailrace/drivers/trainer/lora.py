"""LoRA by peft: a trained low-rank adapter beside frozen weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.models.causal_lm import as_in_files
from tailrace.drivers.trainer.adapter import adapted_modules
from tailrace.drivers.trainer.distributed import gather
from tailrace.errors import CheckpointError, ConfigError
from tailrace.model_folder import model_name

_NAME = "default"
_FACTORS = "lora_A", "lora_B"
_PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter:
    """Puts a new adapter into the linear layers of a model that was read from a folder.

    The factors A are drawn from a fixed seed, so that all ranks draw the same. The factors B are zero. Raises
    a ConfigError if the model has no such layers, or they are not linear."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings) -> None:
        wanted, self._model = adapted_modules(Path(model.config.name_or_path), settings), model
        layers = {
            name: in_files.removesuffix(".weight")
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear | Conv1D)
            for file_name, _ in as_in_files(model, f"{name}.weight", part.weight.detach())
            for in_files in (file_name, file_name.removeprefix(f"{model.base_model_prefix}."))
            if in_files.removesuffix(".weight") in wanted
        }
        pairs = [(name, factor) for name in layers for factor in _FACTORS]
        self._in_model = {f"{layers[n]}.{each}.weight": f"{n}.{each}.weight" for n, each in pairs}
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=[*layers],
            task_type="CAUSAL_LM",
            base_model_name_or_path=model_name(model.config.name_or_path),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                if not layers:
                    raise ValueError("the folder's weights have other names than the model's linear layers")
                inject_adapter_in_model(self._config, model, _NAME)
                self._layers = {n: part for n, part in model.named_modules() if isinstance(part, Linear)}
                if self._layers.keys() != layers.keys():
                    raise ValueError("it adapts other layers, too, whose names end alike")
            except ValueError as why:
                problem = f"peft cannot adapt these layers ({' '.join(str(why).split())[:200]})"
                key, remedy = "trainer.lora.target_modules", "name linear layers of the model"
                raise ConfigError(key, str(settings.target_modules), problem, remedy) from why
        self._config.target_modules = sorted(layers)  # peft's set has another order in each process

    def parameters(self) -> dict[str, Tensor]:
        """The factors, which are trained, by the names of their layers in the model's files."""
        own = {name: place.removesuffix("weight") for name, place in self._in_model.items()}
        return {name: self._model.get_parameter(f"{place}{_NAME}.weight") for name, place in own.items()}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """All weights with their Hugging Face names, the adapter added, one after another. All ranks must
        take sharded ones."""
        for name, parameter in self._model.named_parameters():
            module, _, kind = name.replace(".base_layer.", ".").rpartition(".")
            if ".lora_" not in name:
                yield f"{module}.{kind}", self._merge(self._layers.get(module), kind, gather(parameter))

    @torch.no_grad()
    def _merge(self, layer: Linear | None, kind: str, weight: Tensor) -> Tensor:
        if layer is None or kind != "weight":
            return weight
        a, b = (gather(getattr(layer, factor)[_NAME].weight) for factor in _FACTORS)
        change: Tensor = layer.scaling[_NAME] * (b @ a)
        return weight + (change.T if layer.fan_in_fan_out else change)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model is the one without the adapter: the reference model."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def save(self, folder: Path, factors: Mapping[str, Tensor]) -> None:
        """Write the adapter as peft does. Raises an OSError or SafetensorError if it cannot be written.
        `factors` are whole tensors, by the names of `parameters`."""
        folder.mkdir()
        tensors = {_PREFIX + self._in_model[n]: factor.cpu().contiguous() for n, factor in factors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.inference_mode = True  # as peft writes it
        self._config.save_pretrained(str(folder))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Read the factors that `save` wrote, by the names of `parameters`. Raises a CheckpointError if they
        cannot be read, or were trained with other settings."""
        try:
            tensors = load_file(folder / WEIGHTS_FILE)
            config = LoraConfig.from_pretrained(str(folder))
        except (OSError, SafetensorError, ValueError) as why:
            remedy = "resume with the settings that the run began with, or begin a new run"
            raise CheckpointError(
                f"{folder}: there is no adapter that can be read ({why}); {remedy}"
            ) from why
        for key, name in (("rank", "r"), ("alpha", "lora_alpha")):
            if (before := getattr(config, name)) != (here := getattr(self._config, name)):
                raise CheckpointError(
                    f"{folder}: its {key} is {before}, here {here}; set trainer.lora.{key} as it was"
                )
        names = {_PREFIX + place: name for name, place in self._in_model.items()}
        return {names.get(saved, saved): tensor for saved, tensor in tensors.items()}
