"""Checkpoints: a Hugging Face folder that `transformers` loads, and the trainer's own state beside it.

    config.json, model.safetensors, tokenizer files     the model, float32; an adapter is added to it
    model-drafts.safetensors                            the base's layers that predict several tokens
    adapter/                                            the adapter as peft writes it, if one is trained
    trainer/*.safetensors                               optimizer moments, random states, step counts, critic
    checksums.json                                      of the files of all ranks (checksums.py)

Each rank writes its shards into `trainer/` by torch.distributed.checkpoint. Rank 0 gathers the model. The
folder is written under a temporary name, forced to the disk and renamed when it is complete, so a folder that
exists was written to its end. Later damage is found by the checksums when it is read. Nothing is pickled.

A checkpoint has two halves. `writing` copies the state to host memory. What it returns writes the copy and
may run in a thread, while the trainer goes on. Any number of ranks can read the files: each reads the parts
of its own shards.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import GenerationConfig

from tailrace.contracts.trainer import FILE_BYTES
from tailrace.drivers.models.causal_lm import read_model
from tailrace.drivers.trainer import checksums
from tailrace.drivers.trainer.checksums import STATE_FOLDER, remedy
from tailrace.drivers.trainer.distributed import Ranks, gather, local, scatter
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.errors import CheckpointError, ConfigError, disk_remedy
from tailrace.model_folder import INDEX, folder_error, tensor_headers, weight_files

V = TypeVar("V")
Shapes = Mapping[str, tuple[int, ...]]
Files = Mapping[str, Path]
Owners = Mapping[str, Mapping[str, Tensor]]
"""Parameters of the policy, and of a critic."""

State = Mapping[str, Tensor]
"""State in a checkpoint besides the model. Tensors of a sharded model are DTensors.

    policy.counts, critic.counts        steps, and steps that changed the weights
    policy.first.NAME, .second.NAME     AdamW's moments; none before the first update; the same for a critic
    critic.weight.NAME                  weights of the critic
    random.DEVICE.RANK                  uint8 state of a generator of a rank
"""


def section(prefix: str, named: Mapping[str, V]) -> dict[str, V]:
    """Return the entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}


def prefixed(prefix: str, named: Mapping[str, V]) -> dict[str, V]:
    """Return the entries with a prefix before their names."""
    return {prefix + name: each for name, each in named.items()}


def _writing_state(folder: Path, state: State, ranks: Ranks, *, copied: bool) -> Callable[[], None]:
    """Return what writes a state: the two halves of torch's `async_save`."""
    if ranks.rank:
        state = {name: each for name, each in state.items() if not name.endswith(".counts")}
    files = _files_of(state, ranks)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part = tensor.detach()
        if isinstance(part, DTensor):
            part = part.redistribute(placements=_in_files(part))
        kept |= writer.stage({name: part}) if copied else {name: part}

    def write() -> None:
        group = ranks.writers
        with _alone_on_purpose():
            state_dict_saver.save(kept, storage_writer=writer, process_group=group, no_dist=group is None)

    return write


def _in_files(tensor: DTensor) -> list[Placement]:
    """The placements of a tensor in files, where a rank has one part of it. In memory it has a part of each
    of the matrices that are packed in one tensor and divided (`_StridedShard`): torch does not write it."""
    is_packed = isinstance(tensor.placements[-1], _StridedShard)  # FSDP's own are before the last
    return [Shard(p.dim) if is_packed and isinstance(p, _StridedShard) else p for p in tensor.placements]


def _files_of(tensors: State, ranks: Ranks) -> dict[str, int]:
    """Choose the file of a rank for each tensor. torch holds each whole file in memory, twice, in turn."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size() // ranks.num_ranks
        files[name] = 1 + size // FILE_BYTES
    kinds = [name.split(".")[1] for name in tensors if name.startswith("random.")]
    return files | {f"random.{kind}.{rank}": 1 for kind in kinds for rank in range(ranks.num_ranks)}


def _read_state(folder: Path, owners: Owners, ranks: Ranks) -> dict[str, Tensor]:
    """Read this rank's part of a state."""
    try:
        found = _shapes_in(folder)
        wanted: dict[str, Tensor] = {}
        for owner, parameters in owners.items():
            wanted[f"{owner}.counts"] = torch.zeros(2, dtype=torch.int64)
            trained = {name: each for name, each in parameters.items() if each.requires_grad}
            for part in (f"{owner}.first.", f"{owner}.second."):
                if section(part, found):
                    wanted |= _like(part, folder, found, trained)
        if "critic" in owners:
            wanted |= _like("critic.weight.", folder, found, owners["critic"])
        num_saved = max(1, len(section("random.cpu.", found)))
        for kind in ("cpu", "cuda"):
            if shape := found.get(name := f"random.{kind}.{ranks.rank % num_saved}"):
                wanted[name] = torch.empty(shape, dtype=torch.uint8)
        with _alone_on_purpose():
            state_dict_loader.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        for owner in owners:
            if wanted[f"{owner}.counts"][1] and not section(f"{owner}.second.", wanted):
                raise ValueError(f"the moments of the {owner} are missing")
    except (OSError, SafetensorError, CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: not readable ({error}); {remedy(folder.parent)}") from error
    return wanted


def _shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _must_match(place: Path, found: Shapes, wanted: Shapes) -> None:
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
    """Suppress the warning that torch.distributed is not used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in the files. Raises ValueError if a part of one is missing."""
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


def _like(prefix: str, folder: Path, found: Shapes, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors of the parameters' shapes, which must be the stored ones."""
    _must_match(folder, section(prefix, found), _shapes_of(parameters))
    return {prefix + name: _empty(each) for name, each in parameters.items()}


def _empty(parameter: Tensor) -> Tensor:
    """A tensor of a parameter's shape, with the placements of files. No rank waits for another."""
    part = torch.empty_like(local(parameter))
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements, whole = parameter.device_mesh, _in_files(parameter), parameter.shape
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole, stride=parameter.stride())


ADAPTER_FOLDER = "adapter"
"""A folder of its own: beside config.json, transformers would add the adapter a second time."""
DRAFTS_FILE = "model-drafts.safetensors"
COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "spiece.model",
)


def try_export(policy: PolicyModel, copied_from: Path) -> None:
    """Write the small files of a checkpoint once, into a folder that is removed. Raises a ConfigError if one
    cannot be written. A generation_config.json is copied: transformers refuses to write some of those that it
    reads."""
    if (copied_from / "generation_config.json").is_file():
        policy.model.generation_config = GenerationConfig()
    try:
        with TemporaryDirectory() as folder:
            policy.model.save_pretrained(folder, state_dict={})
    except Exception as why:  # transformers has no common error for it
        problem = f"a checkpoint of this model could not be written ({type(why).__name__}: {why})"
        raise folder_error(copied_from, " ".join(problem.split())[:400]) from why


def writing(
    folder: Path, policy: PolicyModel, state: State, base: Path, drafts: Files, ranks: Ranks, *, copied: bool
) -> Callable[[], None]:
    """Begin a checkpoint, and return what writes it, in place of the one in `folder` if there is one. All
    ranks of a replica call it, and then what it returns. At most one checkpoint is written at a time. Raises
    a CheckpointError if here or later, it cannot be written. The checkpoint that was there is unchanged.

    Args:
        base: the folder whose tokenizer, generation_config.json and `drafts`, with their files, are copied.
        copied: what is written is a copy in host memory, so that training may go on meanwhile.
    """
    partial, is_first = folder.with_name(folder.name + checksums.PARTIAL), ranks.rank == 0

    def prepare() -> None:
        if is_first:
            with _explained(folder):
                checksums.begin(folder)

    ranks.together(prepare)
    num_steps = int(state["policy.counts"][0])
    write_state = _writing_state(partial / STATE_FOLDER, state, ranks, copied=copied)
    model = _whole_model(policy, is_first=is_first, copied=copied)
    factors = {n: gather(each).to("cpu", copy=copied) for n, each in policy.factors().items()}

    def write() -> None:
        with _explained(folder), checksums.replacing(folder, partial) if is_first else nullcontext():
            write_state()  # returns when all ranks have written
            if is_first:
                policy.model.save_pretrained(partial, state_dict=model)
                _copy_drafts(drafts, partial, sum(each.nbytes for each in model.values()))
                if policy.adapter:
                    policy.adapter.save(partial / ADAPTER_FOLDER, factors)
                for pattern in COPIED_FILES:
                    for file in filter(Path.is_file, base.glob(pattern)):
                        shutil.copy(file, partial)
                checksums.seal(partial, num_steps)

    return write


def _copy_drafts(sources: Files, folder: Path, num_bytes: int) -> None:
    """Add drafts to a saved model of so many bytes. transformers would write them in another form."""
    if not sources:
        return
    drafts: dict[str, Tensor] = {}
    for source in dict.fromkeys(sources.values()):
        with safe_open(source, framework="pt") as tensors:
            drafts |= {n: tensors.get_tensor(n) for n, file in sources.items() if file == source}
    num_bytes += sum(each.nbytes for each in drafts.values())
    files = {name: file.name for file in weight_files(folder) for name, *_ in tensor_headers(file)}
    save_file(drafts, folder / DRAFTS_FILE, metadata={"format": "pt"})
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files | dict.fromkeys(drafts, DRAFTS_FILE)}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def read(folder: Path, policy: PolicyModel, critic: Mapping[str, Tensor] | None, ranks: Ranks) -> State:
    """Load the weights of a checkpoint into policy and critic. With LoRA only the adapter is loaded. Both are
    unchanged if this raises. All ranks of a replica call it. Raises a CheckpointError if a file is missing or
    unreadable, or the checkpoint belongs to another model. Damage that can be read was found before
    (checksums.py). `critic`: parameters of the critic, which are overwritten; None if there is no critic."""
    parameters = policy.parameters()

    owners = {"policy": parameters} | ({"critic": critic} if critic else {})

    def prepare() -> tuple[Mapping[str, Tensor] | None, dict[str, Tensor]]:
        weights = _read_weights(folder, policy) if ranks.rank == 0 else None
        return weights, _read_state(folder / STATE_FOLDER, owners, ranks)

    weights, state = ranks.together(prepare)
    for name, tensor in state.items():
        state[name] = _placed(name, tensor, owners)
    scatter(weights, parameters, ranks)
    if critic is not None:
        scatter(section("critic.weight.", state), critic, ranks)
    return state


def _placed(name: str, tensor: Tensor, owners: Owners) -> Tensor:
    """A tensor of a state with the placements of its parameter. All ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    owner, _, of = name.split(".", 2)
    parameter = owners[owner][of]
    assert isinstance(parameter, DTensor)
    return tensor.redistribute(placements=parameter.placements)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        problem = f"{folder} cannot be written ({error}); {disk_remedy(error)}, then --resume"
        raise CheckpointError(problem) from error


def _whole_model(policy: PolicyModel, *, is_first: bool, copied: bool) -> dict[str, Tensor]:
    """The weights and buffers that rank 0 writes; empty in the other ranks, which help to gather them."""
    whole = {}
    for name, tensor in policy.weights():
        if is_first:
            whole[name] = tensor.to("cpu", copy=copied)
    if is_first and not policy.adapter:
        weights = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
        state = policy.model.state_dict()
        whole |= {n: each.to("cpu", copy=copied) for n, each in state.items() if n not in weights}
    return whole


def _read_weights(folder: Path, policy: PolicyModel) -> Mapping[str, Tensor]:
    try:
        if policy.adapter:
            weights = policy.adapter.read(folder / ADAPTER_FOLDER)
        else:
            weights = {name: each.detach() for name, each in read_model(folder).named_parameters()}
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error.problem}; {remedy(folder)}") from error
    _must_match(folder, _shapes_of(weights), _shapes_of(policy.parameters()))
    return weights
