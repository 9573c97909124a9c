"""A judge that this process computes: a reward model, or a language model that answers in one token.

Its layers may live in host memory and are copied to the device as the forward pass reaches them. The copy of
a layer runs on a stream of its own, while the layer before it computes (RollPacker 4.3). The hooks of
accelerate copy a layer when it is called, so its transfer and its computation take turns.

On a CPU the host memory is the model's files, which are read layer by layer; nothing overlaps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.initialization import no_init_weights

from tailrace import clock
from tailrace.contracts.memory import ModelShape
from tailrace.devices import attention_kernels
from tailrace.drivers.data.encoding import ChatTemplate, encode_text
from tailrace.drivers.models.causal_lm import FILES_ALONE
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges.memory import IN_TRANSIT, LayerBudget, batches, is_reward_model, kept_layers
from tailrace.extras.judges.settings import LocalJudgeSettings
from tailrace.model_folder import context_length, read_config, tensor_headers, weight_files

ALIGNMENT = 256
"""Bytes to which tensors are aligned in a buffer."""

Reader = Callable[[int, Mapping[str, Tensor]], None]
"""Copies the tensors of layer i, by their names in the layer, into given ones."""


@dataclass
class _Place:
    """Memory of the device that holds a layer."""

    bytes: Tensor
    layer: int | None = None
    """Number of the layer in it; None: none that is still needed."""
    free: Any = None
    """The computation that used it last."""
    arrived: Any = None
    """The copy into it."""


class StreamedLayers:
    """The layers of a model, of which some are resident on the device.

    Args:
        layers: called one after another in each forward pass. Their parameters are on the meta device or not
            initialised.
        read: reads a layer from the model's files.
    """

    def __init__(self, layers: Sequence[nn.Module], read: Reader, device: torch.device, dtype: torch.dtype):
        self._layers, self._read, self._device, self._dtype = layers, read, device, dtype
        self._module = torch.get_device_module(device)
        self._copies = self._module.Stream()
        self._parameters = [dict(layer.named_parameters()) for layer in layers]
        self._shapes = [{name: p.shape for name, p in each.items()} for each in self._parameters]
        self._sizes = [self._size(shapes) for shapes in self._shapes]
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._slots = self._new_slots()
        self._kept: dict[int, _Place] = {}
        self._host = [] if device.type == "cpu" else self._read_all()
        for i, layer in enumerate(layers):
            self._detach(i)
            layer.register_forward_pre_hook(partial(self._before, i))
            layer.register_forward_hook(partial(self._after, i))

    def keep(self, num: int) -> None:
        """Let so many layers be resident from now on."""
        n = len(self._layers)
        kept = kept_layers(num, n)
        for i in self._kept.keys() - kept:
            self._detach(i)
            del self._kept[i]
        if num == n:
            self._slots = []
        elif not self._slots:
            self._slots = self._new_slots()
        for i in sorted(kept - self._kept.keys()):
            self._kept[i] = place = self._new_place(self._sizes[i])
            place.free = self._module.current_stream().record_event()
            self._copy(i, place)

    def _before(self, i: int, *_: object) -> None:
        place = self._kept.get(i) or self._fetch(i)
        self._module.current_stream().wait_event(place.arrived)
        for name, view in self._views(i, place.bytes).items():
            self._parameters[i][name].data = view
        following = next((j for j in range(i + 1, len(self._layers)) if j not in self._kept), None)
        if following is not None:
            self._fetch(following, spare=place)

    def _after(self, i: int, *_: object) -> None:
        if i in self._kept:
            return
        self._detach(i)
        for place in self._slots:
            if place.layer == i:
                place.layer, place.free = None, self._module.current_stream().record_event()

    def _fetch(self, i: int, spare: _Place | None = None) -> _Place:
        """Begin to copy a layer into a slot other than `spare`, unless it is there already."""
        there = next((place for place in self._slots if place.layer == i), None)
        if there is None:
            there = next(place for place in self._slots if place is not spare)
            self._copy(i, there)
        return there

    def _copy(self, i: int, place: _Place) -> None:
        if place.free is not None:
            self._copies.wait_event(place.free)
        with self._module.stream(self._copies):
            if self._host:
                place.bytes[: self._sizes[i]].copy_(self._host[i], non_blocking=True)
            else:
                self._read(i, self._views(i, place.bytes))
            place.layer, place.arrived = i, self._copies.record_event()

    def _detach(self, i: int) -> None:
        for parameter in self._parameters[i].values():
            parameter.data = self._nothing

    def _views(self, i: int, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a layer in a buffer."""
        views, start = {}, 0
        for name, shape in self._shapes[i].items():
            size = shape.numel() * self._dtype.itemsize
            views[name] = buffer[start : start + size].view(self._dtype).view(shape)
            start += _aligned(size)
        return views

    def _size(self, shapes: Mapping[str, torch.Size]) -> int:
        return sum(_aligned(shape.numel() * self._dtype.itemsize) for shape in shapes.values())

    def _new_slots(self) -> list[_Place]:
        return [self._new_place(max(self._sizes)) for _ in range(IN_TRANSIT)]

    def _new_place(self, size: int) -> _Place:
        return _Place(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _read_all(self) -> list[Tensor]:
        """Read the layers into one pinned buffer. What torch pins itself has the size of a power of two."""
        buffer = torch.empty(sum(self._sizes), dtype=torch.uint8)
        torch.cuda.check_error(
            int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))  # type: ignore[no-untyped-call]
        )
        hosts = list(buffer.split_with_sizes(self._sizes))
        for i, host in enumerate(hosts):
            self._read(i, self._views(i, host))
        return hosts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


KEY = "reward.judges"
JudgeMessages = Sequence[Mapping[str, str]]
T = TypeVar("T")


class WeightFiles:
    """The tensors of a model folder by name. Files are mapped while they are read, so their pages do not stay
    in the memory of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = {name: file for file in weight_files(folder) for name, _, _ in tensor_headers(file)}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors by their names in the files. Raises a ConfigError if the files lack one of them."""
        for name, tensor in into.items():
            if name not in self._file_of:
                problem = f"its files have no tensor {name}"
                remedy = "save the model with the names of its modules"
                raise ConfigError(f"{KEY}.path", str(self._folder), problem, remedy)
            with safe_open(self._file_of[name], framework="pt") as file:
                tensor.copy_(file.get_tensor(name))


class ModelJudge:
    """Scores conversations in batches."""

    def __init__(self, settings: LocalJudgeSettings, model: Any, layers: StreamedLayers) -> None:
        self._settings, self._model, self._layers = settings, model, layers
        self._budget = LayerBudget.of(ModelShape.read(settings.path), settings)
        self._tokenizer = AutoTokenizer.from_pretrained(settings.path, **FILES_ALONE)
        today = date.fromtimestamp(clock.wall_time())  # in all texts, also after midnight
        self._template = ChatTemplate(self._tokenizer, {"strftime_now": today.strftime})
        self._max_tokens = min(settings.max_tokens, context_length(settings.path))
        is_reward = is_reward_model(read_config(settings.path))
        self._encode_bare = self._tokenizer.encode if is_reward else partial(encode_text, self._tokenizer)
        self._labels = self._label_ids() if settings.labels and not is_reward else None

    @classmethod
    @torch.no_grad()
    def load(cls, settings: LocalJudgeSettings) -> "ModelJudge":
        """Load a checked folder. Raises a ConfigError if its files do not fit its architecture, or its labels
        begin with the same token."""
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        if device.index is not None:
            torch.get_device_module(device).set_device(device)  # streams belong to the current device
        is_reward = is_reward_model(read_config(settings.path))
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        config = AutoConfig.from_pretrained(settings.path, **FILES_ALONE)
        with no_init_weights():  # memory that is not touched is not used
            model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        model.eval().requires_grad_(False)
        kinds = set(model._no_split_modules or ())
        names = {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}
        files, prefixes, blocks = WeightFiles(settings.path), list(names), list(names.values())

        def read(i: int, into: Mapping[str, Tensor]) -> None:
            files.read({f"{prefixes[i]}.{name}": tensor for name, tensor in into.items()})

        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        outside = {name: p for name, p in model.named_parameters() if id(p) not in inside}
        layers = StreamedLayers(blocks, read, device, dtype)
        model.to(device)
        persistent = model.state_dict().keys()
        files.read(outside | {name: b for name, b in model.named_buffers() if name in persistent})
        judge = cls(settings, model, layers)
        judge._check_head(is_reward)
        return judge

    def scores(self, conversations: Sequence[JudgeMessages]) -> list[float | RewardFailed]:
        """Score each conversation: the output of a reward model, or the probability of the first label among
        the labels. One that has no score has its failure."""
        found = self._in_batches(conversations, self._compute)
        is_score = [isinstance(each, RewardFailed) or math.isfinite(each) for each in found]
        return [each if is_ok else RewardFailed("nan") for each, is_ok in zip(found, is_score, strict=True)]

    def answers(self, conversations: Sequence[JudgeMessages]) -> list[str | RewardFailed]:
        """Write the likeliest token to each conversation, or return its failure."""
        return self._in_batches(conversations, self._write)

    def _in_batches(
        self,
        conversations: Sequence[JudgeMessages],
        compute: Callable[[Sequence[Sequence[int]]], Sequence[T]],
    ) -> list[T | RewardFailed]:
        texts: list[list[int]] = []
        found: dict[int, T | RewardFailed] = {}
        for number, each in enumerate(conversations):
            try:
                texts.append(self._encode(each))
            except Exception as why:  # templates are programs: they raise errors of their own
                texts.append([])
                found[number] = RewardFailed("judge template", str(why))
        fitting = []
        for number, ids in enumerate(texts):
            if 0 < len(ids) <= self._max_tokens:
                fitting.append(number)
            elif number not in found:
                detail = f"{len(ids)} tokens, and 1 to {self._max_tokens} fit (reward.judges.max_tokens)"
                found[number] = RewardFailed("judge length", detail)
        for batch in batches(fitting, [len(ids) for ids in texts], self._settings.max_tokens):
            found |= zip(batch, compute([texts[n] for n in batch]), strict=True)
        return [found[number] for number in range(len(texts))]

    @torch.no_grad()
    def _last(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The hidden states [texts, width] at the last tokens."""
        # Padding comes last, and no token sees what comes after it.
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        self._layers.keep(self._budget.resident_layers(ids.numel()))
        with attention_kernels():
            hidden = self._model.base_model(ids.to(self._settings.device), use_cache=False).last_hidden_state
        last: Tensor = hidden[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]
        return last

    def _compute(self, texts: Sequence[Sequence[int]]) -> list[float]:
        last = self._last(texts)
        if self._labels is None:
            return [float(score) for score in self._model.score(last)[:, 0].float()]
        logits = self._model.get_output_embeddings()(last).float()
        return [float(share) for share in logits[:, self._labels].softmax(-1)[:, 0]]

    def _write(self, texts: Sequence[Sequence[int]]) -> list[str]:
        ids = self._model.get_output_embeddings()(self._last(texts)).argmax(-1)
        return list(self._tokenizer.batch_decode(ids[:, None], skip_special_tokens=True))

    def _encode(self, messages: JudgeMessages) -> list[int]:
        if self._tokenizer.chat_template is None:
            return list(self._encode_bare("\n".join(message["content"] for message in messages)))
        asks = messages[-1]["role"] != "assistant"
        text = self._template.text(messages, "turn" if asks else "nothing")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _label_ids(self) -> list[int]:
        labels = self._settings.labels
        ids = [self._tokenizer.encode(label, add_special_tokens=False)[:1] for label in labels]
        if [] in ids or len({id for (id,) in ids}) < len(labels):
            problem = "two of them begin with the same token, or one has none"
            raise ConfigError(f"{KEY}.labels", labels, problem, "choose labels whose first tokens differ")
        return [id for (id,) in ids]

    def _check_head(self, is_reward: bool) -> None:
        """Refuse a model whose output is more than its head's, such as one that scales its logits."""
        self._layers.keep(self._budget.resident_layers(1))
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._settings.device)
        hidden = self._model.base_model(ids, use_cache=False).last_hidden_state
        head = self._model.score if is_reward else self._model.get_output_embeddings()
        whole = self._model(ids, use_cache=False).logits
        if not torch.allclose(head(hidden).flatten(), whole.flatten(), rtol=1e-2, atol=1e-3):
            problem = f"a {type(self._model).__name__} changes the output of its head"
            raise ConfigError(f"{KEY}.path", str(self._settings.path), problem, "serve it behind an endpoint")
