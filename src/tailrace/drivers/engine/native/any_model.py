"""Any causal language model of transformers behind the embedded engine: by its own forward pass and caches.

Slower than `CausalLM`. A start tests what is exact: batches of any lengths, with padding; of one length; or
no cache, where the model's own decoding is not its forward pass. No prompt is copied from a running sequence,
and weights come whole.
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Many
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache as OwnCache
from typing_extensions import override

from tailrace.drivers.engine.native.cache import Sequence
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.native.model import check_weights
from tailrace.drivers.engine.native.sampler import Drawn, Draws, draw
from tailrace.drivers.engine.native.scheduler import Admitted
from tailrace.drivers.engine.native.states import Block, CachedBatch, States, emptied, joined
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.models.causal_lm import (
    backbone,
    length_dependent_ropes,
    own_head,
    read_model,
    short_windows,
    tensors_of,
    views_as_in_files,
)

TOGETHER: Mapping[str, Callable[[Sequence], Hashable]] = {
    (ANY := "batches of any lengths"): lambda sequence: None,
    (EQUAL := "batches of equal lengths"): lambda sequence: len(sequence.tokens),
    (UNCACHED := "batches of any lengths, without a cache"): lambda sequence: None,
}
"""Sequences for which it is equal are computed together; the fastest first."""


class AnyLM:
    """Weights and the forward pass. Raises a ConfigError if the folder is incomplete or damaged, or its
    weights cannot be replaced. `max_tokens`: the longest sequence."""

    _empty: OwnCache | None

    def __init__(self, path: Path, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._dtype = device, dtype
        self.restore(path)
        config = self._module.config.get_text_config()
        ropes = length_dependent_ropes(self._module)
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        if "longrope" in ropes:  # beyond it the frequencies of all tokens change
            rope = config.rope_parameters
            self.max_tokens = min(self.max_tokens, rope["original_max_position_embeddings"])
        for self.together in list(TOGETHER)[bool(ropes) :]:
            if self.together == UNCACHED or self._is_exact():
                break

    def weights(self) -> dict[str, Tensor]:
        """Views of the weights by their names in Hugging Face files."""
        return self._weights

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite all weights, in place. Raises as `CausalLM.load`."""
        check_weights(tensors, self._weights)
        for name, weight in self._weights.items():
            weight.copy_(tensors[name])

    def release(self) -> None:
        """Free the memory of the weights, until `restore`."""
        del self._module, self._weights, self._backbone

    def restore(self, path: Path, on_file: Callable[[], None] = lambda: None) -> None:
        """Take the memory, with the weights of a Hugging Face folder. Raises as `read_model`."""
        self._module = module = read_model(path, self._dtype).to(self.device).eval().requires_grad_(False)
        on_file()
        module.set_attn_implementation("eager")  # fused attention of transformers ignores caps and sinks
        self._backbone, self._empty = backbone(module), None
        self._takes = signature(module.forward).parameters.keys()
        self._past = "past_key_values" if "past_key_values" in self._takes else "cache_params"
        self._weights: dict[str, Tensor] = {}
        for name, weight in tensors_of(module).items():
            self._weights |= views_as_in_files(module, name, weight)

    def prefill(self, contexts: list[list[int]]) -> list[Block]:
        """The states after contexts of one length, at least one token."""
        out = self._backbone(input_ids=self._tensor(contexts), use_cache=True)
        batch = CachedBatch(out[self._past], [len(each) for each in contexts])
        self._empty = self._empty or emptied(batch.cache)
        return [batch.block(row) for row in range(len(contexts))]

    def step(self, batch: CachedBatch, ids: list[int]) -> Tensor:
        """Read one more token of each row. Returns the logits, [rows, V], float32."""
        lengths, named = batch.lengths, {}
        longest = max(lengths)
        if min(lengths) < longest:
            places, own = torch.arange(longest + 1, device=self.device), self._tensor(lengths)
            named["attention_mask"] = (places >= longest - own[:, None]).long()
            named |= {"position_ids": own[:, None]} if "position_ids" in self._takes else {}
        named |= {self._past: batch.cache} if batch.cache is not None else {}
        out = self._module(input_ids=self._tensor([[id] for id in ids]), use_cache=True, **named)
        batch.cache, batch.lengths = out[self._past], [length + 1 for length in lengths]
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def whole(self, contexts: list[list[int]]) -> Tensor:
        """The logits after contexts, computed without a cache, padded on the right: [rows, V], float32."""
        longest, ends = max(map(len, contexts)), [len(each) - 1 for each in contexts]
        ids = self._tensor([[*each, *[0] * (longest - len(each))] for each in contexts])
        hidden = self._backbone(input_ids=ids, use_cache=False)[0]
        return self.logits(hidden[range(len(ends)), ends])

    def states_after(self, ids: Many[int], start: int) -> Tensor:
        """The inputs of the head after each token from `start` on, without a cache: [len(ids) - start, H]."""
        states: Tensor = self._backbone(input_ids=self._tensor([list(ids)]), use_cache=False)[0]
        return states[0, start:]

    def logits(self, states: Tensor) -> Tensor:
        """The logits of states, [T, V], float32."""
        logits: Tensor = own_head(self._module)(states)
        return logits.float()

    def logprobs(self, ids: Many[int], temperature: float) -> Tensor:
        """Log-probs of all tokens but the first, without a cache: [len(ids) - 1]."""
        logits: Tensor = self._module(input_ids=self._tensor([list(ids)]), use_cache=False).logits[0, :-1]
        logp = (logits.float() / temperature).log_softmax(-1)
        return logp.gather(1, self._tensor(list(ids[1:]))[:, None])[:, 0]

    @property
    def empty(self) -> OwnCache:
        """A cache without tokens."""
        if self._empty is None:
            self.prefill([[0]])
        assert self._empty is not None
        return self._empty

    @torch.inference_mode()
    def _is_exact(self) -> bool:
        """Whether sequences may be computed together. Log-probs of likely tokens are compared with those of
        the forward pass without a cache, beyond the border of windows."""
        vocabulary = self._module.config.get_text_config().vocab_size
        first, second = ([i * step % vocabulary for i in range(1, 41)] for step in (7, 11))
        near = 2e-4 if self._dtype == torch.float32 else 0.3
        rows = [first, second[:25] if self.together == ANY else second]
        try:
            with short_windows(self._module):
                blocks = [self.prefill([ids[:-12]])[0] for ids in rows]
                batch = joined(self.empty, blocks, [len(ids) - 12 for ids in rows])
                steps = [self.step(batch, [ids[place] for ids in rows]) for place in range(-12, 0)]
                plain = [self._module(input_ids=self._tensor([ids]), use_cache=False) for ids in rows]
        except Exception:  # of any architecture
            return False
        finally:
            self._empty = None  # its windows are short
        own = torch.stack([each.logits[0, -12:] for each in plain]).float().log_softmax(-1)
        off = (torch.stack(steps, 1).log_softmax(-1) - own).abs()[own > own.amax(-1, keepdim=True) - 7]
        return bool(off.max() <= near)

    def _tensor(self, values: Many[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


class AnyEngine(NativeEngine):
    """One replica of any causal language model. Raises as `AnyLM`."""

    _model: AnyLM  # type: ignore[assignment]

    @override
    def _open(self, settings: NativeEngineSettings) -> States:
        device, budget = torch.device(settings.device), settings.kv_cache_tokens
        dtype = getattr(torch, settings.dtype)
        self._model = AnyLM(self._path, max_tokens=budget, device=device, dtype=dtype)
        self._states = States(TOGETHER[self._model.together], budget=budget)
        return self._states

    @override
    def _fill(self, admissions: list[Admitted]) -> None:
        for sequence in [each for admission in admissions for each in admission.sequences if each.to_verify]:
            part = range(sequence.num_prompt - 1, len(sequence.context))
            self._verify(sequence, part, self._model.states_after(sequence.context, part.start))
        admissions = [each for each in admissions if each.sequences[0].id in self._scheduler.running]
        firsts = [admission.sequences[0] for admission in admissions]
        blocks: dict[Sequence, Block] = {each: [] for each in firsts}
        for length in {len(each.context) for each in firsts if self._model.together != UNCACHED} - {0}:
            alike = [each for each in firsts if len(each.context) == length]
            blocks |= zip(alike, self._model.prefill([each.context for each in alike]), strict=True)
        for admission, block in zip(admissions, blocks.values(), strict=True):
            for sequence in admission.sequences:
                self._states.write(sequence, block)

    @override
    def _drawn(self, news: dict[Sequence, range], drafts: dict[Sequence, list[int]], draws: Draws) -> Drawn:
        logits: dict[Sequence, Tensor] = {}
        if self._model.together == UNCACHED:
            return draw(self._model.whole([each.tokens for each in news]), *draws)
        for group in self._states.groups(list(news)):
            batch = self._states.batch(group, self._model.empty)
            logits |= zip(group, self._model.step(batch, [each.tokens[-1] for each in group]), strict=True)
        return draw(torch.stack([logits[each] for each in news]), *draws)

    @override
    def score(self, ids: Many[int], num_prefix: int) -> list[float]:
        with torch.inference_mode():
            return self._model.logprobs(ids, self._sampling.temperature)[num_prefix - 1 :].tolist()

    def probe(self, ids: Many[int], num_prefix: int) -> tuple[list[float], list[float]]:
        logprobs = self.score(ids, num_prefix)
        return logprobs, logprobs
