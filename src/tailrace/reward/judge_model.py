"""A judge that this process computes: a reward model, or a language model that answers in one token."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.initialization import no_init_weights

from tailrace.devices import attention_kernels
from tailrace.errors import ConfigError, RewardFailed
from tailrace.memory import ModelShape
from tailrace.model_folder import context_length, read_config, tensor_headers, weight_files
from tailrace.reward.judge_memory import LayerBudget, batches, is_reward_model
from tailrace.reward.judge_settings import LocalJudgeSettings
from tailrace.reward.streamed_layers import StreamedLayers

KEY = "reward.judges"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Messages = Sequence[Mapping[str, str]]


class WeightFiles:
    """The tensors of a model folder by name. Files are mapped while they are read, so their pages do not stay
    in the memory of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = {name: file for file in weight_files(folder) for name, _, _ in tensor_headers(file)}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy tensors by their names in the files.

        Raises:
            ConfigError: the files lack one of them.
        """
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
        self._tokenizer = AutoTokenizer.from_pretrained(settings.path, local_files_only=True)
        self._max_tokens = min(settings.max_tokens, context_length(settings.path))
        self._labels = None if is_reward_model(read_config(settings.path)) else self._label_ids()

    @classmethod
    @torch.no_grad()
    def load(cls, settings: LocalJudgeSettings) -> "ModelJudge":
        """Load a checked folder.

        Raises:
            ConfigError: its files do not fit its architecture, or its labels begin with the same token.
        """
        device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
        if device.index is not None:
            torch.get_device_module(device).set_device(device)  # streams belong to the current device
        is_reward = is_reward_model(read_config(settings.path))
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        config = AutoConfig.from_pretrained(settings.path, local_files_only=True)
        with no_init_weights():  # memory that is not touched is not used
            model = kind.from_config(config, dtype=dtype)
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
        judge._check_head()
        return judge

    def scores(self, conversations: Sequence[Messages]) -> list[float | RewardFailed]:
        """Score each conversation: the output of a reward model, or the probability of the first label among
        the labels. One that has no score has its failure."""
        texts: list[list[int]] = []
        found: dict[int, float | RewardFailed] = {}
        for number, each in enumerate(conversations):
            try:
                texts.append(self._encode(each))
            except Exception as why:  # templates are programs: they raise errors of their own
                texts.append([])
                found[number] = RewardFailed("judge template", f"the judge's chat template refuses it: {why}")
        fitting = []
        for number, ids in enumerate(texts):
            if 0 < len(ids) <= self._max_tokens:
                fitting.append(number)
            elif number not in found:
                detail = f"{len(ids)} tokens, and 1 to {self._max_tokens} fit (reward.judges.max_tokens)"
                found[number] = RewardFailed("judge length", detail)
        for batch in batches(fitting, [len(ids) for ids in texts], self._settings.max_tokens):
            for number, score in zip(batch, self._compute([texts[n] for n in batch]), strict=True):
                found[number] = score if math.isfinite(score) else RewardFailed("nan")
        return [found[number] for number in range(len(texts))]

    @torch.no_grad()
    def _compute(self, texts: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, texts))
        self._layers.keep(self._budget.resident_layers(len(texts) * longest))
        # Padding comes last, and no token sees what comes after it.
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        with attention_kernels():
            hidden = self._model.base_model(ids.to(self._settings.device), use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]
        if self._labels is None:
            return [float(score) for score in self._model.score(last)[:, 0].float()]
        logits = self._model.get_output_embeddings()(last).float()
        return [float(share) for share in logits[:, self._labels].softmax(-1)[:, 0]]

    def _encode(self, messages: Messages) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return list(tokenizer.encode("\n".join(message["content"] for message in messages)))
        asks = messages[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _label_ids(self) -> list[int]:
        labels = self._settings.labels
        ids = [self._tokenizer.encode(label, add_special_tokens=False)[:1] for label in labels]
        if [] in ids or len({id for (id,) in ids}) < len(labels):
            problem = "two of them begin with the same token, or one has none"
            raise ConfigError(f"{KEY}.labels", labels, problem, "choose labels whose first tokens differ")
        return [id for (id,) in ids]

    def _check_head(self) -> None:
        """Refuse a model whose output is more than its head's, such as one that scales its logits."""
        self._layers.keep(self._budget.resident_layers(1))
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._settings.device)
        hidden = self._model.base_model(ids, use_cache=False).last_hidden_state
        head = self._model.score if self._labels is None else self._model.get_output_embeddings()
        whole = self._model(ids, use_cache=False).logits
        if not torch.allclose(head(hidden).flatten(), whole.flatten(), rtol=1e-2, atol=1e-3):
            problem = f"a {type(self._model).__name__} changes the output of its head"
            raise ConfigError(f"{KEY}.path", str(self._settings.path), problem, "serve it behind an endpoint")
