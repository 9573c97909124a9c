"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32; an adapter is added to it
    adapter/                                            the adapter as peft writes it, if one is trained
    trainer/*.safetensors                               optimizer moments, random states, step counts, critic
    checksums.json                                      of the files of all ranks (checksums.py)

Each rank writes its shards into `trainer/` (state_files.py). Rank 0 gathers the model. The folder is written
under a temporary name, forced to the disk and renamed when it is complete, so a folder that exists was
written to its end. Later damage is found by the checksums when it is read. Nothing is pickled.

A checkpoint has two halves. `writing` copies the state to host memory. What it returns writes the copy and
may run in a thread, while the trainer goes on.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tailrace.errors import CheckpointError, ConfigError
from tailrace.trainer import checksums, state_files
from tailrace.trainer.checksums import remedy
from tailrace.trainer.fsdp import gather, scatter
from tailrace.trainer.launch import Ranks
from tailrace.trainer.model import PolicyModel, read_model
from tailrace.trainer.state_files import TrainerState, load, must_match, shapes_of

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


def writing(
    folder: Path,
    policy: PolicyModel,
    state: TrainerState,
    tokenizer_from: Path,
    ranks: Ranks,
    *,
    copied: bool,
) -> Callable[[], None]:
    """Begin a checkpoint, and return what writes it, in place of the one in `folder` if there is one. All
    ranks of a replica call it, and then what it returns. At most one checkpoint is written at a time.

    Args:
        tokenizer_from: the folder whose tokenizer files are copied.
        copied: what is written is a copy in host memory, so that training may go on meanwhile.

    Raises:
        CheckpointError: it cannot be written, here or in what is returned. The checkpoint that was there is
            unchanged.
    """
    partial = folder.with_name(folder.name + ".partial")
    is_first = ranks.rank == 0

    def prepare() -> None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    ranks.together(lambda: _explained(folder, prepare))
    write_state = state_files.writing(partial / STATE_FOLDER, state, ranks, copied=copied)
    model = _whole_model(policy, is_first=is_first, copied=copied)
    factors = {n: _in_host(gather(each), copied) for n, each in policy.factors().items()}

    def write() -> None:
        write_state()  # returns when all ranks have written
        if not is_first:
            return
        policy.model.save_pretrained(partial, state_dict=model)
        if policy.adapter:
            policy.adapter.save(partial / ADAPTER_FOLDER, factors)
        for pattern in TOKENIZER_FILES:
            for file in filter(Path.is_file, tokenizer_from.glob(pattern)):
                shutil.copy(file, partial)
        checksums.seal(partial, state.policy.num_steps)
        _put_in_place(partial, folder)

    def write_or_clear() -> None:
        try:
            _explained(folder, write)
        except CheckpointError:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    return write_or_clear


def read(
    folder: Path, policy: PolicyModel, critic: Mapping[str, Tensor] | None, ranks: Ranks
) -> TrainerState:
    """Load the weights of a checkpoint into policy and critic. With LoRA only the adapter is loaded.
    Both are unchanged if this raises. All ranks of a replica call it.

    Args:
        critic: parameters of the critic, which are overwritten; None if there is no critic.

    Raises:
        CheckpointError: a file is missing or unreadable, or the checkpoint belongs to another model. Damage
            that can be read was found before (checksums.py).
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


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename a complete checkpoint to its name. One that is there stays, under another name, until then."""
    old = folder.with_name(folder.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    partial.rename(folder)
    checksums.synchronize(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _explained(folder: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except (OSError, SafetensorError, CheckpointException) as error:
        problem = f"{folder} cannot be written ({error}); make room on the disk, then --resume"
        raise CheckpointError(problem) from error


def _whole_model(policy: PolicyModel, *, is_first: bool, copied: bool) -> dict[str, Tensor]:
    """The weights and buffers that rank 0 writes; empty in the other ranks, which help to gather them."""
    whole = {}
    for name, tensor in policy.weights():
        if is_first:
            whole[name] = _in_host(tensor, copied)
    if is_first and not policy.adapter:
        weights = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
        state = policy.model.state_dict()
        whole |= {name: _in_host(each, copied) for name, each in state.items() if name not in weights}
    return whole


def _in_host(tensor: Tensor, copied: bool) -> Tensor:
    return tensor.to("cpu", copy=copied)


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
