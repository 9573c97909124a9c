"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32; an adapter is added to it
    adapter/                                            the adapter as peft writes it, if one is trained
    trainer/*.safetensors                               optimizer moments, random states, step counts, critic
    checksums.json                                      of the files of all ranks (checksums.py)

Each rank writes its shards into `trainer/` by torch.distributed.checkpoint. Rank 0 gathers the model. The
folder is written under a temporary name, forced to the disk and renamed when it is complete, so a folder that
exists was written to its end. Later damage is found by the checksums when it is read. Nothing is pickled.

A checkpoint has two halves. `writing` copies the state to host memory. What it returns writes the copy and
may run in a thread, while the trainer goes on.

Each rank writes what it has of each tensor of the state. Any number of ranks can read the files: each reads
the parts of its own shards.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tailrace.errors import CheckpointError, ConfigError
from tailrace.trainer import checksums
from tailrace.trainer.checksums import remedy
from tailrace.trainer.distributed import Ranks, gather, scatter
from tailrace.trainer.model import PolicyModel, read_model

FILE_BYTES = 2**28
"""Size of a rank's file, about."""
V = TypeVar("V")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer besides the parameters. AdamW's moments are empty before the first update.
    Those of a sharded model are DTensors."""

    num_steps: int
    num_updates: int
    """Steps that changed the weights: AdamW's own count. Steps with a gradient that is not finite are not in
    it."""
    first_moments: Mapping[str, Tensor]
    second_moments: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a checkpoint has besides the model."""

    policy: OptimizerState
    critic: OptimizerState | None
    """None: the algorithm has no critic."""
    critic_weights: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    """uint8 states of this process's generators, by device type."""


def writing_state(folder: Path, state: TrainerState, ranks: Ranks, *, copied: bool) -> Callable[[], None]:
    """Return what writes a state. All ranks of a replica call it, and what it returns, which raises a
    CheckpointException if a rank cannot write. These are the two halves of torch's `async_save`.

    Args:
        copied: the state is copied to host memory first, so that training may go on while it is written.
    """
    tensors = {f"random.{kind}.{ranks.rank}": each for kind, each in state.random.items()}
    for owner, optimizer in (("policy", state.policy), ("critic", state.critic)):
        if optimizer is None:
            continue
        if ranks.rank == 0:
            tensors[f"{owner}.counts"] = torch.tensor([optimizer.num_steps, optimizer.num_updates])
        tensors |= {f"{owner}.first.{name}": each for name, each in optimizer.first_moments.items()}
        tensors |= {f"{owner}.second.{name}": each for name, each in optimizer.second_moments.items()}
    tensors |= {f"critic.weight.{name}": each for name, each in state.critic_weights.items()}
    files = _files_of(tensors, ranks)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    kept = writer.stage(tensors) if copied else tensors

    def write() -> None:
        group = ranks.writers
        with _alone_on_purpose():
            state_dict_saver.save(kept, storage_writer=writer, process_group=group, no_dist=group is None)

    return write


def _files_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """In which of its files a rank writes each tensor. torch holds a whole file in memory, twice, and writes
    one after another."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size() // ranks.num_ranks
        files[name] = 1 + size // FILE_BYTES
    kinds = [name.split(".")[1] for name in tensors if name.startswith("random.")]
    return files | {f"random.{kind}.{rank}": 1 for kind in kinds for rank in range(ranks.num_ranks)}


def load(
    folder: Path, parameters: Mapping[str, Tensor], critic: Mapping[str, Tensor] | None, ranks: Ranks
) -> TrainerState:
    """Read this rank's part of what `save` wrote.

    Args:
        parameters: of the policy. Moments are those of the ones that are trained.
        critic: parameters of the critic; None: there is none.

    Raises:
        CheckpointError: a file is missing or damaged, or the state belongs to another model.
    """
    try:
        found = _shapes_in(folder)
        wanted = _optimizer_tensors("policy", folder, found, parameters)
        if critic is not None:
            wanted |= _optimizer_tensors("critic", folder, found, critic)
            wanted |= _like("critic.weight.", folder, found, critic)
        num_saved = max(1, len(_section("random.cpu.", found)))
        for kind in ("cpu", "cuda"):
            if shape := found.get(name := f"random.{kind}.{ranks.rank % num_saved}"):
                wanted[name] = torch.empty(shape, dtype=torch.uint8)
        with _alone_on_purpose():
            state_dict_loader.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        for owner in ("policy", "critic") if critic is not None else ("policy",):
            if wanted[f"{owner}.counts"][1] and not _section(f"{owner}.second.", wanted):
                raise ValueError(f"the moments of the {owner} are missing")
    except (OSError, SafetensorError, CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: not readable ({error}); {remedy(folder.parent)}") from error
    return TrainerState(
        _optimizer_state("policy", wanted),
        _optimizer_state("critic", wanted) if critic is not None else None,
        _section("critic.weight.", wanted),
        {name.split(".")[0]: each for name, each in _section("random.", wanted).items()},
    )


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def must_match(place: Path, found: Shapes, wanted: Shapes) -> None:
    """Raises CheckpointError if the names or the shapes differ."""
    for name in sorted(found.keys() | wanted.keys()):
        ours, theirs = wanted.get(name, "absent"), found.get(name, "absent")
        if ours != theirs:
            raise CheckpointError(
                f"{place}: it belongs to another model: {name} is {theirs}, here {ours}; "
                "resume with the model that the run began with, or begin a new run"
            )


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Without the warning that torch.distributed is not used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in the files.

    Raises:
        ValueError: a part of a tensor is missing.
    """
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {}
    for name, info in metadata.items():
        assert isinstance(info, TensorStorageMetadata)
        if sum(math.prod(chunk.sizes) for chunk in info.chunks) != math.prod(info.size):
            raise ValueError(f"a part of {name} is missing")
        shapes[name] = tuple(info.size)
    if "policy.counts" not in shapes:
        raise ValueError("the file of rank 0 is missing")
    return shapes


def _optimizer_tensors(
    owner: str, folder: Path, found: Shapes, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Empty tensors for the stored state of an optimizer."""
    wanted = {f"{owner}.counts": torch.zeros(2, dtype=torch.int64)}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for prefix in (f"{owner}.first.", f"{owner}.second."):
        if _section(prefix, found):
            wanted |= _like(prefix, folder, found, trained)
    return wanted


def _like(prefix: str, folder: Path, found: Shapes, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors of the parameters' shapes, which must be the stored ones."""
    must_match(folder, _section(prefix, found), shapes_of(parameters))
    return {prefix + name: torch.empty_like(each, requires_grad=False) for name, each in parameters.items()}


def _optimizer_state(owner: str, tensors: Mapping[str, Tensor]) -> OptimizerState:
    num_steps, num_updates = tensors[f"{owner}.counts"].tolist()
    first, second = (_section(f"{owner}.{part}.", tensors) for part in ("first", "second"))
    return OptimizerState(num_steps, num_updates, first, second)


def _section(prefix: str, named: Mapping[str, V]) -> dict[str, V]:
    return {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}


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
    write_state = writing_state(partial / STATE_FOLDER, state, ranks, copied=copied)
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
