"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32
    trainer/*.safetensors                               optimizer moments, random states, step counts, critic

Each rank writes its shards into `trainer/` (state_files.py). Rank 0 gathers the model. The folder is written
under a temporary name and renamed when it is complete, so a folder that exists was written to its end. Later
damage is detected when it is read. Nothing is pickled.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tailrace.errors import CheckpointError, ConfigError
from tailrace.trainer.fsdp import scatter
from tailrace.trainer.launch import Ranks
from tailrace.trainer.model import read_model
from tailrace.trainer.state_files import TrainerState, load, must_match, remedy, save, shapes_of

STATE_FOLDER = "trainer"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "spiece.model",
)


def write(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    state: TrainerState,
    tokenizer_from: Path,
    ranks: Ranks,
) -> None:
    """Write a checkpoint, replacing the one in `folder` if there is one. All ranks of a replica call it.

    Args:
        weights: whole parameters of the model.
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
            model.save_pretrained(partial, state_dict=whole)
            for pattern in TOKENIZER_FILES:
                for file in filter(Path.is_file, tokenizer_from.glob(pattern)):
                    shutil.copy(file, partial)

    try:
        ranks.together(lambda: _writing(folder, prepare))
        whole = {n: tensor for n, tensor in model.state_dict().items() if not isinstance(tensor, DTensor)}
        for name, tensor in weights:
            if is_first:
                whole[name] = tensor.cpu()
        _writing(folder, lambda: save(partial / STATE_FOLDER, state, ranks))
        ranks.together(lambda: _writing(folder, export))
    except CheckpointError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def read(
    folder: Path, model: PreTrainedModel, critic: Mapping[str, Tensor] | None, ranks: Ranks
) -> TrainerState:
    """Load the weights of a checkpoint into model and critic. Both are unchanged if this raises. All ranks of
    a replica call it.

    Args:
        critic: parameters of the critic, which are overwritten; None if there is no critic.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint belongs to another model.
    """
    parameters = dict(model.named_parameters())

    def prepare() -> tuple[Mapping[str, Tensor] | None, TrainerState]:
        weights = _read_weights(folder, parameters) if ranks.rank == 0 else None
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


def _read_weights(folder: Path, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    try:
        weights = {name: each.detach() for name, each in read_model(folder).named_parameters()}
    except ConfigError as error:
        raise CheckpointError(f"{error.problem}; {remedy(folder)}") from error
    must_match(folder, shapes_of(weights), shapes_of(parameters))
    return weights
