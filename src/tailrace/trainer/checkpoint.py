"""Checkpoints: a Hugging Face folder that `transformers` loads, with what the trainer needs beside it.

    config.json, model.safetensors, tokenizer files     the model, float32
    trainer.safetensors                                 optimizer moments, random states, step count

The folder is written under another name and renamed when it is whole, so a folder that exists was
written to its end; what is damaged later is found when it is read. Nothing is pickled.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.errors import CheckpointError

TRAINER_FILE = "trainer.safetensors"
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
class TrainerState:
    """All that a trainer has besides the model."""

    num_steps: int
    first_moments: Mapping[str, Tensor]
    """AdamW's running mean of the gradient, by parameter name; empty before the first step."""
    second_moments: Mapping[str, Tensor]
    """AdamW's running mean of its square."""
    random_states: Mapping[str, Tensor]
    """uint8, by device type."""


def write(folder: Path, model: PreTrainedModel, state: TrainerState, tokenizer_from: Path) -> None:
    """Save everything to `folder`, replacing it if it exists."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in _tokenizer_files(tokenizer_from):
        shutil.copy(file, partial)
    tensors = {
        **_prefixed("first", state.first_moments),
        **_prefixed("second", state.second_moments),
        **_prefixed("random", state.random_states),
    }
    save_file(tensors, partial / TRAINER_FILE, metadata={"num_steps": str(state.num_steps)})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read(folder: Path, model: PreTrainedModel) -> TrainerState:
    """Load the weights into `model` and return the rest. The model is untouched when this raises.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
    """
    weights = _read_weights(folder)
    state = _read_state(folder / TRAINER_FILE)
    parameters = dict(model.named_parameters())
    _must_match(folder, weights, parameters)
    if state.num_steps:
        _must_match(folder / TRAINER_FILE, state.first_moments, parameters)
        _must_match(folder / TRAINER_FILE, state.second_moments, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return state


def _read_weights(folder: Path) -> dict[str, Tensor]:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: no readable model ({error}); {_REMEDY}") from error
    if report["missing_keys"]:
        raise CheckpointError(f"{folder}: lacks {sorted(report['missing_keys'])}; {_REMEDY}")
    return dict(model.named_parameters())


def _read_state(file: Path) -> TrainerState:
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            num_steps = int(reader.metadata()["num_steps"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); {_REMEDY}") from error
    return TrainerState(
        num_steps, _only("first", tensors), _only("second", tensors), _only("random", tensors)
    )


_REMEDY = "resume from an older checkpoint"


def _must_match(file: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        ours = tuple(wanted[name].shape) if name in wanted else "absent"
        theirs = tuple(found[name].shape) if name in found else "absent"
        if ours != theirs:
            raise CheckpointError(
                f"{file}: of another model: {name} is {theirs}, here {ours}; "
                "resume with the model that the run began with, or begin a new run"
            )


def _tokenizer_files(folder: Path) -> Iterable[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _only(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
