"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32
    trainer.safetensors                                 optimizer moments, random states, step counts
    critic.safetensors                                  weights and optimizer state of the critic, if any

The folder is written under a temporary name and renamed when it is complete, so a folder that exists was
written to its end. Later damage is detected when it is read. Nothing is pickled.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.errors import CheckpointError
from tailrace.trainer.model_folder import UnreadableModel, read_model

TRAINER_FILE = "trainer.safetensors"
CRITIC_FILE = "critic.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "spiece.model",
)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer besides the parameters."""

    num_steps: int
    num_updates: int
    """Steps that changed the weights: AdamW's own count. Steps with a gradient that is not finite are not in
    it."""
    first_moments: Mapping[str, Tensor]
    """AdamW's running mean of the gradient, by parameter name; empty before the first update."""
    second_moments: Mapping[str, Tensor]
    """AdamW's running mean of the squared gradient, by parameter name."""


@dataclass(frozen=True, slots=True)
class CriticState:
    """Weights and optimizer state of the critic."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state of a trainer besides the model."""

    optimizer: OptimizerState
    random_states: Mapping[str, Tensor]
    """uint8 states of torch's generators, by device type."""
    critic: CriticState | None = None


def write(folder: Path, model: PreTrainedModel, state: TrainerState, tokenizer_from: Path) -> None:
    """Write a checkpoint, replacing the one in `folder` if there is one.

    Args:
        folder: of the checkpoint.
        model: to save.
        state: of the trainer.
        tokenizer_from: the folder whose tokenizer files are copied.

    Raises:
        CheckpointError: it cannot be written. The checkpoint that was there is unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        _write(partial, model, state, tokenizer_from)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{folder} cannot be written ({error}); make room on the disk, then --resume"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _write(partial: Path, model: PreTrainedModel, state: TrainerState, tokenizer_from: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in _tokenizer_files(tokenizer_from):
        shutil.copy(file, partial)
    _write_optimizer(partial / TRAINER_FILE, state.optimizer, _prefixed("random", state.random_states))
    if state.critic:
        weights = _prefixed("weight", state.critic.weights)
        _write_optimizer(partial / CRITIC_FILE, state.critic.optimizer, weights)


def read(folder: Path, model: PreTrainedModel, *, critic: Mapping[str, Tensor] | None = None) -> TrainerState:
    """Load the weights of a checkpoint into model and critic. Both are unchanged if this raises.

    Args:
        folder: of the checkpoint.
        model: is overwritten.
        critic: parameters of the critic, which are overwritten; None if there is no critic.

    Returns:
        The state of the trainer.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint belongs to another model.
    """
    weights = _read_weights(folder)
    optimizer, tensors = _read_optimizer(folder / TRAINER_FILE)
    parameters = dict(model.named_parameters())
    _must_match(folder, weights, parameters)
    _must_fit(folder / TRAINER_FILE, optimizer, parameters)
    state = TrainerState(
        optimizer, _only("random", tensors), None if critic is None else _read_critic(folder, critic)
    )
    _fill(parameters, weights)
    if critic is not None and state.critic is not None:
        _fill(critic, state.critic.weights)
    return state


def _read_critic(folder: Path, parameters: Mapping[str, Tensor]) -> CriticState:
    optimizer, tensors = _read_optimizer(folder / CRITIC_FILE)
    weights = _only("weight", tensors)
    _must_match(folder / CRITIC_FILE, weights, parameters)
    _must_fit(folder / CRITIC_FILE, optimizer, parameters)
    return CriticState(weights, optimizer)


@torch.no_grad()
def _fill(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def _read_weights(folder: Path) -> dict[str, Tensor]:
    try:
        return dict(read_model(folder).named_parameters())
    except UnreadableModel as error:
        raise CheckpointError(f"{error}; {_remedy(folder)}") from error


def _write_optimizer(file: Path, state: OptimizerState, others: Mapping[str, Tensor]) -> None:
    tensors = {
        **_prefixed("first", state.first_moments),
        **_prefixed("second", state.second_moments),
        **others,
    }
    counts = {"num_steps": str(state.num_steps), "num_updates": str(state.num_updates)}
    save_file(tensors, file, metadata=counts)


def _read_optimizer(file: Path) -> tuple[OptimizerState, dict[str, Tensor]]:
    """The optimizer's state, and all tensors of the file."""
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            counts = reader.metadata()
            num_steps, num_updates = int(counts["num_steps"]), int(counts["num_updates"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); {_remedy(file.parent)}") from error
    moments = _only("first", tensors), _only("second", tensors)
    return OptimizerState(num_steps, num_updates, *moments), tensors


def _remedy(folder: Path) -> str:
    return f"remove {folder} and resume again: the run goes on from the checkpoint before it"


def _must_match(file: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        ours = tuple(wanted[name].shape) if name in wanted else "absent"
        theirs = tuple(found[name].shape) if name in found else "absent"
        if ours != theirs:
            raise CheckpointError(
                f"{file}: it belongs to another model: {name} is {theirs}, here {ours}; "
                "resume with the model that the run began with, or begin a new run"
            )


def _must_fit(file: Path, optimizer: OptimizerState, parameters: Mapping[str, Tensor]) -> None:
    if optimizer.num_updates:
        _must_match(file, optimizer.first_moments, parameters)
        _must_match(file, optimizer.second_moments, parameters)


def _tokenizer_files(folder: Path) -> Iterable[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _only(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
