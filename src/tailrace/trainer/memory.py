"""The memory that one rank of the trainer needs, from the shape of the model. Imports no torch.

The phases of a rank, one of which is the largest: reading the folder, a pass over a micro-batch of
`max_tokens_per_microbatch` tokens, publishing, and saving a checkpoint. The copy from which a checkpoint is
written is there in all of them but the first, if training goes on beside it. benchmarks/memory.py measures.
"""

from dataclasses import dataclass

from tailrace.memory import ITEM_BYTES, TRANSFORMERS_BYTES, ModelShape, ProcessMemory, largest_phase
from tailrace.trainer.base import TrainerSettings

LOGITS_AT_ONCE = 1 << 26
"""As logprobs.CHUNK_ELEMENTS."""
FILE_BYTES = 2**28
"""As state_files.FILE_BYTES. torch holds a file of a checkpoint twice while it is written."""
LOGIT_BYTES = 20
"""Of one logit: scaled, normalised, exponentiated and their gradients, in float32."""
CUDA_BYTES = 600 * 2**20
"""CUDA's context and the workspaces of its libraries."""


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """What the trainer does beside training the policy.

    Args:
        adapter_parameters: of LoRA; None: all parameters are trained.
        published_bytes: size of one publication.
        kept_publications: in the memory of the trainer's process.
        has_critic: a critic of the size of the model.
        keeps_old_policy: a copy of the published weights.
        saves_beside: it trains on while a checkpoint is written.
    """

    adapter_parameters: int | None = None
    published_bytes: int = 0
    kept_publications: int = 0
    has_critic: bool = False
    keeps_old_policy: bool = False
    saves_beside: bool = False


def trainer_memory(
    shape: ModelShape, settings: TrainerSettings, work: TrainerWork, *, is_first: bool, longest: int = 0
) -> ProcessMemory:
    """Estimate the memory of one process of the trainer.

    Args:
        is_first: rank 0, which reads the folder, publishes and exports; the other ranks do not.
        longest: tokens of the longest sample, which may exceed a micro-batch.
    """
    ranks, has_adapter = settings.ranks, work.adapter_parameters is not None
    is_sharded = ranks > 1 or settings.cpu_offload
    trained = work.adapter_parameters if work.adapter_parameters is not None else shape.num_parameters
    whole = 4 * shape.num_parameters
    kept = {
        "weights": (whole + (4 * trained if has_adapter else 0)) // ranks,
        "gradient": 4 * trained // ranks,
        "optimizer": 8 * trained // ranks,
        "critic": 4 * whole // ranks if work.has_critic else 0,
        "old policy": 4 * trained // ranks if work.keeps_old_policy else 0,
    }
    tokens = max(settings.max_tokens_per_microbatch, longest)
    computing = _pass(shape, settings, tokens, is_sharded, is_trained=not has_adapter)
    publications = work.kept_publications * work.published_bytes
    state = (8 * trained + (3 * whole if work.has_critic else 0)) // ranks
    model = whole + (4 * trained if has_adapter else 0) if is_first else 0
    files = 2 * min(FILE_BYTES, state)
    host = {
        "process": TRANSFORMERS_BYTES,
        "publications": publications if is_first else 0,
        "checkpoint copy": state + model + files if work.saves_beside else 0,
    }
    gathered = 8 * shape.tensor_parameters if is_sharded else 0
    is_copied = is_first and (is_sharded or has_adapter or settings.device != "cpu")
    copied = state + model if settings.async_checkpoints else model if is_copied else 0
    phases = {
        "pass": computing,
        "publish": {"new publication": max(gathered, work.published_bytes if is_first else 0)},
        "save": {"checkpoint": gathered if work.saves_beside else max(gathered, files + copied)},
    }
    read = {"whole model": whole, "files": shape.stored_bytes} if is_first else {}
    load = {"process": TRANSFORMERS_BYTES, "weights": kept["weights"]} | read
    replicas = settings.replicas
    num, name = (replicas, "trainer") if is_first else ((ranks - 1) * replicas, "trainer rank")
    if settings.device == "cpu":
        held = largest_phase({each: host | kept | phase for each, phase in phases.items()} | {"load": load})
        return ProcessMemory(name, "cpu", held, {}, num)
    on_device = {"CUDA": CUDA_BYTES} | ({} if settings.cpu_offload else kept) | computing
    offloaded = kept if settings.cpu_offload else {}
    in_host = {each: host | offloaded | phases[each] for each in ("publish", "save")} | {"load": load}
    return ProcessMemory(
        name, settings.device, largest_phase({"pass": on_device}), largest_phase(in_host), num
    )


def _pass(
    shape: ModelShape, settings: TrainerSettings, tokens: int, is_sharded: bool, *, is_trained: bool
) -> dict[str, int]:
    """The largest moment of a forward and backward pass: at the head, or in the backward pass of a block."""
    size = ITEM_BYTES[settings.dtype]
    block, outside = shape.block_parameters, shape.outside_parameters
    activations = tokens * block_activation_bytes(shape, size)
    kept = tokens * shape.hidden_size * 4 * shape.num_layers  # the residual stream
    if not settings.activation_checkpointing:
        kept = activations * shape.num_layers
        activations = 0
    rows = max(1, min(tokens, LOGITS_AT_ONCE // shape.vocabulary))
    logits = rows * shape.vocabulary * LOGIT_BYTES
    if is_sharded:  # gathered in the type of the computation; gradients are reduced in float32
        at_head = {"gathered": size * (outside + block), "new gradient": size * outside if is_trained else 0}
        in_block = {
            "gathered": size * (outside + 3 * block),
            "new gradient": (size * (outside + block) + 4 * block) if is_trained else 0,
        }
        at_end = {"gathered": size * outside, "new gradient": (size + 8) * outside if is_trained else 0}
    else:  # autocast keeps copies of all weights
        cast = {"gathered": 0 if size == 4 else size * shape.num_parameters}
        at_head = cast | {"new gradient": 4 * shape.tensor_parameters if is_trained else 0}
        in_block = at_end = at_head
    return largest_phase(
        {
            "head": {"activations": kept, "logits": logits} | at_head,
            "block": {"activations": kept + activations} | in_block,
            "end": at_end,
        }
    )


def block_activation_bytes(shape: ModelShape, size: int) -> int:
    """Bytes that one block keeps for the backward pass of one token.

    The residual stream is float32, so norms keep their input and their normalised input in float32. Autocast
    makes a copy of its input for each linear layer. Attention keeps queries, keys, values and its output,
    before and after the sequences are joined; the feed-forward layer both branches, the activation and the
    product.

    Args:
        size: bytes of a number of the computation.
    """
    hidden, query, kv = shape.hidden_size, shape.query_size, shape.kv_size
    norms = 16 * hidden + (4 + size) * (query + kv) * shape.head_norms
    inputs = size * hidden * (2 if size == 4 else 5)
    return norms + inputs + size * (3 * query + 2 * kv + 4 * shape.mlp_size)
