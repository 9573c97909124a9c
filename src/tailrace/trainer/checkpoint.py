"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32; an adapter is added to it
    adapter/                                            the adapter as peft writes it, if one is trained
    trainer/*.safetensors                               optimizer moments, random states, step counts, critic

Each rank writes its shards into `trainer/` (state_files.py). Rank 0 gathers the model. The folder is written
under a temporary name and renamed when it is complete, so a folder that exists was written to its end. Later
damage is detected when it is read. Nothing is pickled.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from tailrace.errors import CheckpointError, ConfigError
from tailrace.trainer.fsdp import gather, scatter
from tailrace.trainer.launch import Ranks
from tailrace.trainer.model import PolicyModel, read_model
from tailrace.trainer.state_files import TrainerState, load, must_match, remedy, save, shapes_of

STATE_FOLDER = "trainer"
ADAPTER_FOLDER = "adapter"
"""A folder of its own: beside config.json, transformers would add the adapter a second time."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "spiece.model",
)


def write(folder: Path, policy: PolicyModel, state: TrainerState, tokenizer_from: Path, ranks: Ranks) -> None:
    """Write a checkpoint, replacing the one in `folder` if there is one. All ranks of a replica call it.

    Args:
        tokenizer_from: the folder whose tokenizer files are copied.

    Raises:
        CheckpointError: it cannot be written. The checkpoint that was there is unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    is_first = ranks.rank == 0

    def prepare() -> None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def export() -> None:
        if is_first:
            policy.model.save_pretrained(partial, state_dict=whole)
            if policy.adapter:
                policy.adapter.save(partial / ADAPTER_FOLDER, factors)
            for pattern in TOKENIZER_FILES:
                for file in filter(Path.is_file, tokenizer_from.glob(pattern)):
                    shutil.copy(file, partial)

    try:
        ranks.together(lambda: _writing(folder, prepare))
        factors = {n: gather(each) for n, each in policy.parameters().items()} if policy.adapter else {}
        _writing(folder, lambda: save(partial / STATE_FOLDER, state, ranks))  # its copy is free again below
        whole = {} if policy.adapter else _not_sharded(policy)
        for name, tensor in policy.weights():
            if is_first:
                whole[name] = tensor.cpu()
        ranks.together(lambda: _writing(folder, export))
    except CheckpointError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def read(
    folder: Path, policy: PolicyModel, critic: Mapping[str, Tensor] | None, ranks: Ranks
) -> TrainerState:
    """Load the weights of a checkpoint into policy and critic. With LoRA only the adapter is loaded.
    Both are unchanged if this raises. All ranks of a replica call it.

    Args:
        critic: parameters of the critic, which are overwritten; None if there is no critic.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint belongs to another model.
    """
    parameters = policy.parameters()

    def prepare() -> tuple[Mapping[str, Tensor] | None, TrainerState]:
        weights = _read_weights(folder, policy) if ranks.rank == 0 else None
        return weights, load(folder / STATE_FOLDER, parameters, critic, ranks)

    weights, state = ranks.together(prepare)
    scatter(weights, parameters)
    if critic is not None:
        scatter(state.critic_weights, critic)
    return state


def _writing(folder: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except (OSError, SafetensorError, CheckpointException) as error:
        problem = f"{folder} cannot be written ({error}); make room on the disk, then --resume"
        raise CheckpointError(problem) from error


def _not_sharded(policy: PolicyModel) -> dict[str, Tensor]:
    """The state of a model without what `PolicyModel.weights` gathers."""
    state = policy.model.state_dict()
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, DTensor)}


def _read_weights(folder: Path, policy: PolicyModel) -> Mapping[str, Tensor]:
    try:
        if policy.adapter:
            weights = policy.adapter.read(folder / ADAPTER_FOLDER)
        else:
            weights = {name: each.detach() for name, each in read_model(folder).named_parameters()}
    except ConfigError as error:
        raise CheckpointError(f"{error.problem}; {remedy(folder)}") from error
    must_match(folder, shapes_of(weights), shapes_of(policy.parameters()))
    return weights
