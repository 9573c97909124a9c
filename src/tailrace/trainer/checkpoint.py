"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32; an adapter is added to it
    adapter/                                            the adapter as peft writes it, if one is trained
    trainer.safetensors                                 optimizer moments, random states, step counts
    critic.safetensors                                  weights and optimizer state of the critic, if any

The folder is written under a temporary name and renamed when it is complete, so a folder that exists was
written to its end. Later damage is detected when it is read. Nothing is pickled.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tailrace.errors import CheckpointError, ConfigError
from tailrace.trainer.model import PolicyModel, read_model

TRAINER_FILE = "trainer.safetensors"
CRITIC_FILE = "critic.safetensors"
ADAPTER_FOLDER = "adapter"
"""Beside config.json, transformers would add the adapter to the model a second time."""
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
    """The state of an optimizer besides the parameters. AdamW's moments are empty before the first update."""

    num_steps: int
    num_updates: int
    """Steps that changed the weights: AdamW's own count. Steps with a gradient that is not finite are not in
    it."""
    first_moments: Mapping[str, Tensor]
    second_moments: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of an optimizer and what is stored in the same file."""

    optimizer: OptimizerState
    tensors: Mapping[str, Tensor]
    """Of the policy: uint8 states of torch's generators, by device type. Of the critic: its weights."""


def write(
    folder: Path, policy: PolicyModel, state: SavedState, critic: SavedState | None, tokenizer_from: Path
) -> None:
    """Write a checkpoint, replacing the one in `folder` if there is one.

    Args:
        tokenizer_from: the folder whose tokenizer files are copied.

    Raises:
        CheckpointError: it cannot be written. The checkpoint that was there is unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        policy.model.save_pretrained(partial, state_dict=dict(policy.weights()))
        if policy.adapter:
            policy.adapter.save(partial / ADAPTER_FOLDER)
        for pattern in TOKENIZER_FILES:
            for file in filter(Path.is_file, tokenizer_from.glob(pattern)):
                shutil.copy(file, partial)
        _save(partial / TRAINER_FILE, state, "random")
        if critic:
            _save(partial / CRITIC_FILE, critic, "weight")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        problem = f"{folder} cannot be written ({error}); make room on the disk, then --resume"
        raise CheckpointError(problem) from error
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read(
    folder: Path, policy: PolicyModel, critic: Mapping[str, Tensor] | None
) -> tuple[SavedState, SavedState | None]:
    """Load the weights of a checkpoint into policy and critic. Of an adapted policy only the adapter is read.
    Both are unchanged if this raises.

    Args:
        critic: parameters of the critic, which are overwritten; None if there is no critic.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint belongs to another model.
    """
    weights = _read_weights(folder, policy)
    parameters = policy.parameters()
    _must_match(folder, weights, parameters)
    state = _load(folder / TRAINER_FILE, "random", parameters)
    critic_state = None
    if critic is not None:
        critic_state = _load(folder / CRITIC_FILE, "weight", critic)
        _must_match(folder / CRITIC_FILE, critic_state.tensors, critic)
        _copy(critic_state.tensors, critic)
    _copy(weights, parameters)
    return state, critic_state


def _read_weights(folder: Path, policy: PolicyModel) -> Mapping[str, Tensor]:
    if policy.adapter:
        return policy.adapter.read(folder / ADAPTER_FOLDER)
    try:
        return dict(read_model(folder).named_parameters())
    except ConfigError as error:
        raise CheckpointError(f"{error.problem}; {_remedy(folder)}") from error


def _save(file: Path, state: SavedState, section: str) -> None:
    """Write a state. A tensor is stored as `section.name`."""
    optimizer = state.optimizer
    sections = {"first": optimizer.first_moments, "second": optimizer.second_moments, section: state.tensors}
    tensors = {f"{section}.{name}": named[name] for section, named in sections.items() for name in named}
    counts = {"num_steps": str(optimizer.num_steps), "num_updates": str(optimizer.num_updates)}
    save_file(tensors, file, metadata=counts)


def _load(file: Path, section: str, parameters: Mapping[str, Tensor]) -> SavedState:
    """Read what `_save` wrote, for an optimizer of these parameters."""
    sections: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        with safe_open(file, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118
                prefix, _, name = key.partition(".")
                sections[prefix][name] = reader.get_tensor(key)
            counts = reader.metadata()
            num_steps, num_updates = int(counts["num_steps"]), int(counts["num_updates"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}); {_remedy(file.parent)}") from error
    if num_updates:
        _must_match(file, sections["first"], parameters)
        _must_match(file, sections["second"], parameters)
    optimizer = OptimizerState(num_steps, num_updates, sections["first"], sections["second"])
    return SavedState(optimizer, sections[section])


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


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
