"""The model that is trained: a Hugging Face causal language model on packed micro-batches.

Weights are float32; bfloat16 applies to the computation (autocast). The model is in evaluation mode: without
dropout, the trained policy is the policy that generates. Any architecture whose attention goes through
transformers' AttentionInterface is supported; it is tested on three sequences when it is loaded.

The logits of C tokens are [C, V] and would exceed everything else in memory. They are computed for one chunk
of rows at a time, and computed again in the backward pass (activation checkpointing).

Attention is registered with transformers under the name `PACKED`. Packed sequences attend only within
themselves, and no [T, T] mask is made. On CUDA with half precision, torch's kernel for sequences of varying
length computes all at once; elsewhere scaled_dot_product_attention computes each sequence. The boundaries
arrive as `cu_seq_lens_q`, the keyword with which transformers packs for flash attention, so every
architecture that runs packed there runs packed here. Their lengths come as a list, too: to read them from the
device would stop it in each layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from tailrace.contracts.trainer import CHUNK_ELEMENTS, TrainerSettings
from tailrace.contracts.weights import DTYPE
from tailrace.devices import attention_kernels, for_fused_attention
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import DTYPES, Ranks, blocks, gather, recompute_activations, shard
from tailrace.drivers.trainer.packing import MicroBatch, pack, share
from tailrace.errors import ConfigError
from tailrace.model_folder import folder_error, weights_defect
from tailrace.types import SampleId

if TYPE_CHECKING:
    from tailrace.drivers.trainer.lora import Adapter


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies of C tokens."""

    logprobs: Tensor
    """[C] float32, differentiable."""
    entropy: Tensor
    """[C] float32, not differentiable."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> TokenLogProbs:
    """Compute log softmax((h W^T + b) / temperature) at the targets: the distribution that was sampled from.

    Args:
        hidden: [C, D] final hidden states at the positions that predict the targets.
        weight: [V, D] weight of the output embedding.
        bias: [V] or None.
        targets: [C]
        dtype: of the matrix products; the softmax is float32.
    """
    rows = max(1, CHUNK_ELEMENTS // len(weight))
    others = (weight, bias, temperature, dtype)
    if len(targets) <= rows:
        return TokenLogProbs(*_chunk(hidden, targets, *others))
    parts = [
        checkpoint(_chunk, *chunk, *others, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenLogProbs(torch.cat(logprobs), torch.cat(entropies))


def _chunk(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [rows] each."""
    with torch.autocast(hidden.device.type, dtype, enabled=dtype != torch.float32):
        logits = linear(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = logits.float() if bias is None else logits.float() + bias
        logp = (logits / temperature).log_softmax(-1)
        constant = logp.detach()
        entropy = -(constant.exp() * constant).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy


PACKED = "tailrace_packed"
HARMLESS = {"position_ids", "max_length_q", "max_length_k", "dropout", "use_cache", "output_attentions"}
"""Arguments of an attention that do not change what packed sequences in evaluation mode get."""


def packed_causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    sequence_lengths: Sequence[int] = (),
    keys: Tensor | None = None,
    key_lengths: Sequence[int] = (),
    **others: object,  # transformers' signature: architectures pass more than this needs
) -> tuple[Tensor, None]:
    """Causal attention of T packed tokens with H heads, G key and value heads, dimension D. Raises a
    NotImplementedError if the architecture does not pass the boundaries on, or passes an argument that would
    change the result: it is named.

    Args:
        query: [1, H, T, D]
        key, value: [1, G, T, D]
        attention_mask: ignored: the boundaries define what a token attends to.
        scaling: factor of query times key; None: D^(-1/2).
        sliding_window: number of positions that a token attends to, including itself; None: all before it.
        cu_seq_lens_q: [S + 1] int32: the S sequences begin at its first S entries, the last entry is T.
        sequence_lengths: [S], of the sequences.
        keys, cu_seq_lens_k, key_lengths: what each sequence attends to (`MicroBatch`), where some share a
            context. The last keys of a sequence are its own tokens.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    if cu_seq_lens_q is None or not sequence_lengths:
        raise NotImplementedError("packed boundaries do not reach its attention")
    for name, given in others.items():
        if given is not None and name not in HARMLESS and (name, given) != ("is_causal", True):
            raise NotImplementedError(
                f"its attention takes {name!r}, which packed attention does not compute"
            )
    if keys is None:
        key_lengths, cu_seq_lens_k = sequence_lengths, cu_seq_lens_q
    else:
        key, value = key.index_select(2, keys), value.index_select(2, keys)
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        # Autocast does not apply to the kernel: rotary embeddings may have left float32 queries and keys.
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        longest = max(sequence_lengths), max(key_lengths)
        boundaries = cu_seq_lens_q, cu_seq_lens_k
        # The window is aligned at the last query and the last key.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(q, k, v, *boundaries, *longest, scale=scaling, window_size=window, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[None], None
    key, value = for_fused_attention(query, key, value)
    outs = []
    queries = torch.split(query, list(sequence_lengths), dim=2)
    parts = (torch.split(x, list(key_lengths), dim=2) for x in (key, value))
    with attention_kernels():
        for q, k, v in zip(queries, *parts, strict=True):
            band = _band(q.shape[2], k.shape[2], sliding_window, q.device)
            causal = band is None
            outs.append(
                scaled_dot_product_attention(q, k, v, band, is_causal=causal, scale=scaling, enable_gqa=True)
            )
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys] bool mask of causal attention whose last query is the last key, in a sliding window;
    None if plain causal attention is the same."""
    if queries == keys and (window is None or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries + 1 - window)


AttentionInterface.register(PACKED, packed_causal_attention)


def read_model(folder: Path) -> PreTrainedModel:
    """Load a causal language model in float32. Raises a ConfigError if a file is missing or damaged, or
    config.json and the weights do not fit together. The message names the file."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers has no common error for a bad folder
        raise folder_error(folder, _defect(folder, error)) from error
    # transformers fills missing and mismatched weights with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        names = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        problem = f"does not fit the weights: {len(wrong)} are missing or have another shape ({names})"
        raise folder_error(folder, f"{folder / 'config.json'} {problem}")
    return model


def read_shape(folder: Path) -> PreTrainedModel:
    """Make the model of a folder without its weights. Their memory is not touched. Raises a ConfigError if
    config.json is missing or describes no model."""
    try:
        with no_init_weights():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # as above
        raise folder_error(folder, _defect(folder, error)) from error
    model.tie_weights()
    return model


def as_in_files(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A whole parameter as Hugging Face files have it: each expert has tensors of its own there, and
    transformers keeps the experts of a layer in one."""
    for file_name, part in revert_weight_conversion(model, {name: tensor}).items():
        yield file_name, part if part.numel() == tensor.numel() else part.clone()  # no two share memory


def _defect(folder: Path, error: Exception) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    for file in sorted(folder.glob("*.safetensors")):
        if defect := weights_defect(file):
            return f"{file} {defect}"
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError):  # it names the file itself
        return reason
    problem = f"describes no model that can be loaded ({type(error).__name__}: {reason})"
    return f"{folder / 'config.json'} {problem}"


def hidden_states(model: PreTrainedModel, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Run a model without its head: [C, D], the last hidden states that predict a completion token."""
    with torch.autocast(batch.input_ids.device.type, dtype, enabled=dtype != torch.float32):
        hidden: Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=batch.boundaries,
            cu_seq_lens_k=batch.key_boundaries,
            max_length_q=max(batch.lengths),
            max_length_k=max(batch.key_lengths),
            sequence_lengths=batch.lengths,
            keys=batch.keys if batch.key_lengths != batch.lengths else None,
            key_lengths=batch.key_lengths,
        ).last_hidden_state[0]
    return hidden[batch.predictors]


class LogProbs(nn.Module):
    """The computation from packed tokens to log-probs: what FSDP sees as the root of the model."""

    def __init__(self, model: PreTrainedModel, temperature: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.temperature, self.dtype = model, temperature, dtype

    def forward(self, batch: MicroBatch) -> TokenLogProbs:
        head = self.model.get_output_embeddings()
        found = token_logprobs(
            hidden_states(self.model.base_model, batch, self.dtype),
            head.weight,
            head.bias,
            batch.targets,
            temperature=self.temperature,
            dtype=self.dtype,
        )
        return found._replace(logprobs=found.logprobs.clone())  # FSDP's hooks would be lost with a view


class PolicyModel:
    """Computes log-probs of completion tokens under the current weights. Raises a ConfigError if the
    architecture cannot run packed, or has no layers for the adapter. `model`: with its head, in float32, on
    the CPU. With a sharded model only rank 0 needs its weights."""

    adapter: "Adapter | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        *,
        temperature: float,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model.eval()
        self.device, self._ranks = torch.device(settings.device), ranks or Ranks()
        self._logprobs = LogProbs(model, temperature, DTYPES[settings.dtype])
        mesh = self._ranks.mesh
        if mesh is None:
            model.to(self.device)
        if self._ranks.rank == 0 and (why := self._packing_defect()):
            problem = f"an architecture of type {model.config.model_type!r} does not run packed: {why}"
            remedy = "choose one of the list in docs/servers-and-devices.md"
            raise ConfigError("model.path", model.config.name_or_path, problem, remedy)
        model.set_attn_implementation(PACKED)
        if settings.lora:
            from tailrace.drivers.trainer.lora import Adapter  # peft is an extra

            self.adapter = Adapter(model.requires_grad_(False), settings.lora)
        if settings.activation_checkpointing:
            recompute_activations(blocks(model))
        if mesh is not None:
            shard(self._logprobs, model, mesh, settings)
        self._parameters = self.adapter.parameters() if self.adapter else dict(self.model.named_parameters())

    @classmethod
    def load(
        cls, path: Path, settings: TrainerSettings, temperature: float, ranks: Ranks | None = None
    ) -> "PolicyModel":
        """Load a Hugging Face folder. `ranks`: over which it is sharded; None: this process has the model.
        Raises a ConfigError if the folder is incomplete or damaged, or the architecture cannot run packed."""
        model = read_model(path) if ranks is None or ranks.rank == 0 else read_shape(path)
        return cls(model, settings, temperature=temperature, ranks=ranks)

    def micro_batches(self, samples: Sequence[TrainingSample], max_tokens: int) -> list[MicroBatch]:
        """Pack all samples with a token in the loss, at most `max_tokens` input tokens together."""
        return [MicroBatch.of(bin, self.device) for bin in pack(samples, max_tokens)]

    def own_micro_batches(self, samples: Sequence[TrainingSample], max_tokens: int) -> list[MicroBatch]:
        """Pack the micro-batches of this rank, with fillers."""
        rank, num_ranks = self._ranks.rank, self._ranks.num_ranks
        bins = share(samples, max_tokens, rank=rank, num_ranks=num_ranks)
        device = self.device
        return [MicroBatch.of(bin, device) if bin else MicroBatch.filler(device) for bin in bins]

    def logprobs(self, batch: MicroBatch) -> TokenLogProbs:
        """Compute log-probs and entropies of the batch's completion tokens: [C] each. All ranks of a replica
        compute at the same time, each its own batch."""
        found: TokenLogProbs = self._logprobs(batch)
        return found

    @contextmanager
    def rounded(self, dtype: DTYPE) -> Iterator[None]:
        """Inside the block log-probs are those of weights that were rounded to a type: matrix products are of
        it, and gains, biases and embeddings are rounded."""
        own, self._logprobs.dtype = self._logprobs.dtype, DTYPES[dtype]
        vectors = [each.data for each in self.model.parameters() if each.dim() == 1]
        kept = [each.clone() for each in vectors]
        for each in vectors:
            each.copy_(each.to(DTYPES[dtype]))
        embedding = self.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, __, out: out.to(DTYPES[dtype]).to(out.dtype))
        try:
            yield
        finally:
            hook.remove()
            self._logprobs.dtype = own
            for each, old in zip(vectors, kept, strict=True):
                each.copy_(old)

    def synchronize(self) -> None:
        """Wait for the device: its kernels and copies run behind the host. On a CPU nothing does."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the trained parameters by their Hugging Face names, or those of the adapter. Tied parameters
        occur once. Those of a sharded model are DTensors."""
        return self._parameters

    def factors(self) -> Mapping[str, Tensor]:
        """The parameters of the adapter; none without one."""
        return self._parameters if self.adapter else {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights with their Hugging Face names, the adapter added, one after another. They are copies if
        they are sharded or adapted; all ranks of the replica must take those of a sharded model."""
        if self.adapter:
            yield from self.adapter.merged()
            return
        for name, parameter in self._parameters.items():
            yield name, gather(parameter)

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside the block the model is the one that LoRA began with."""
        return self.adapter.off() if self.adapter else nullcontext()

    @torch.no_grad()
    def _packing_defect(self) -> str | None:
        """Why packed log-probs are not the model's own, or None. Three sequences are packed, the last of
        which shares the prompt of the first. They must agree with the model's own forward pass. With other
        tokens in the first and the last, the second must be the same bits. Experts are an exception: how many
        tokens each gets changes the shapes of their products."""
        model, kept = self.model, self._logprobs.dtype == torch.float32
        vocabulary = len(model.get_output_embeddings().weight)
        first, other, second = ([i * step % vocabulary for i in range(1, 65)] for step in (7, 11, 13))
        if rope := LENGTH_DEPENDENT & {each for module in model.modules() for each in _rope_types(module)}:
            return f"its rope type {min(rope)!r} depends on the longest sequence of a pack"
        with _short_windows(model):
            model.set_attn_implementation("eager")
            alone = torch.cat(
                [self._plain_logprobs(second, 32), self._plain_logprobs(first[:60] + other[:4], 60)]
            )
            if not alone.isfinite().all():
                problem, remedy = "its log-probs are not finite: weights are damaged", "choose another folder"
                raise ConfigError("model.path", model.config.name_or_path, problem, remedy)
            model.set_attn_implementation(PACKED)
            try:
                packed, changed = (
                    self._packed_logprobs(
                        (ids[:60], ids[60:]), (second[:32], second[32:]), (ids[:60], other[:4])
                    )
                    for ids in (first, other)
                )
            except (NotImplementedError, AttributeError, TypeError) as why:
                return str(why)
        leak = float((packed - changed)[:32].abs().max())
        has_experts = any("expert" in name for name, _ in model.named_parameters())
        if leak > (0 if not has_experts else 1e-5 if kept else 0.1):
            return f"a packed sequence changes log-probs of the next by up to {leak:.2g}"
        if not torch.allclose(alone, packed, atol=(near := 1e-3 if kept else 0.1), rtol=near):
            return f"packed log-probs differ from its own by up to {(alone - packed).abs().max():.2g}"
        return None

    def _packed_logprobs(self, *pairs: tuple[list[int], list[int]]) -> Tensor:
        """[num_tokens] of the completions but the first. `pairs`: prompts and completions."""
        samples = [
            TrainingSample(SampleId(0, 0, i), prompt, completion, [0.0] * len(completion), 0.0)
            for i, (prompt, completion) in enumerate(pairs)
        ]
        return self.logprobs(MicroBatch.of(samples, self.model.device)).logprobs[len(pairs[0][1]) :]

    def _plain_logprobs(self, ids: list[int], num_prompt: int) -> Tensor:
        """[num_tokens] by the model's own forward pass."""
        given = torch.tensor([ids], device=self.model.device)
        logits: Tensor = self.model(given, use_cache=False).logits[0, num_prompt - 1 : -1]
        logp = (logits.float() / self._logprobs.temperature).log_softmax(-1)
        return logp.gather(1, given[0, num_prompt:, None])[:, 0]


LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies are those of the longest sequence of a forward pass."""


def _rope_types(module: nn.Module) -> list[str]:
    """Return the types of a rotary embedding; some have one for each type of layer."""
    found = getattr(module, "rope_type", None)
    return [*found.values()] if isinstance(found, dict) else [found] if isinstance(found, str) else []


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block windows and chunks of attention have 9 tokens: a layer that does not pass its window
    on would be right on short sequences."""
    owners = [model.config, *model.modules()]
    names = ("sliding_window", "attention_chunk_size")
    own = [(each, name, getattr(each, name, None)) for each in owners for name in names]
    changed = [(each, name, size) for each, name, size in own if isinstance(size, int) and size > 9]
    try:
        for each, name, _ in changed:
            setattr(each, name, 9)
        yield
    finally:
        for each, name, size in changed:
            setattr(each, name, size)
