"""Causal language models of transformers, read from Hugging Face folders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from tailrace.model_folder import check_all_used, check_files, folder_error

FILES_ALONE = {"local_files_only": True, "trust_remote_code": False}
"""Arguments with which transformers reads a folder: code in it is neither run nor asked for."""
Head = Callable[[Tensor], Tensor]
"""Computes logits, [C, V], of last hidden states, [C, D]."""


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model. Raises a ConfigError as `check_files`, and if config.json and the weights
    do not fit together. The message names the file."""
    check_files(folder)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **FILES_ALONE, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # transformers has no common error for a bad folder
        raise folder_error(folder, _defect(error)) from error
    # transformers fills missing and mismatched weights with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        names = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        problem = f"does not fit the weights: {len(wrong)} are missing or have another shape ({names})"
        raise folder_error(folder, f"config.json {problem}")
    check_all_used(folder, report["unexpected_keys"])
    return model


def read_shape(folder: Path) -> PreTrainedModel:
    """Make the model of a folder without its weights. Their memory is not touched. Raises a ConfigError if
    config.json is missing or describes no model."""
    try:
        with no_init_weights():
            config = AutoConfig.from_pretrained(folder, **FILES_ALONE)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # as above
        raise folder_error(folder, _defect(error)) from error
    model.tie_weights()
    return model


def as_in_files(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A whole weight as Hugging Face files have it: each expert has tensors of its own there, and
    transformers keeps the experts of a layer in one."""
    for file_name, part in revert_weight_conversion(model, {name: tensor}).items():
        yield file_name, part if part.numel() == tensor.numel() else part.clone()  # no two share memory


def views_as_in_files(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of a weight as Hugging Face files have it. Raises a ConfigError if a part there is no view."""
    places = torch.arange(tensor.numel(), dtype=torch.int32).view(tensor.shape)
    for file_name, part in revert_weight_conversion(model, {name: places}).items():
        first = int(part.flatten()[0])
        seconds = (
            part.movedim(axis, 0).reshape(part.shape[axis], -1)[:2, 0][-1] for axis in range(part.dim())
        )
        strides = [int(second) - first for second in seconds]
        view = part.shape, strides, first
        if not torch.equal(places.as_strided(*view), part):
            problem = f"{file_name} is not a part of transformers' {name}: new weights cannot be loaded"
            raise folder_error(Path(model.config.name_or_path), problem, "choose another model")
        yield file_name, tensor.as_strided(*view)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a model and the other tensors of its files, by name; tied ones once."""
    return {name: each.detach() for name, each in model.named_parameters()} | buffers_of(model)


def buffers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model's files that are no weights."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: each for name, each in model.state_dict().items() if name not in names}


def _defect(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "config.json: auto_map: it needs code in its folder, which is not run"
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError):  # it names the file itself
        return reason
    return f"config.json describes no model that can be loaded ({type(error).__name__}: {reason})"


def length_dependent_ropes(model: PreTrainedModel) -> set[str]:
    """The types of rotary embeddings of a model whose frequencies are those of the longest sequence of a
    forward pass."""
    return {"dynamic", "longrope"} & {each for module in model.modules() for each in _rope_types(module)}


def _rope_types(module: nn.Module) -> list[str]:
    """Return the types of a rotary embedding; some have one for each type of layer."""
    found = getattr(module, "rope_type", None)
    return [*found.values()] if isinstance(found, dict) else [found] if isinstance(found, str) else []


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    inner = model.base_model
    parts = (each for each in model.children() if isinstance(each, PreTrainedModel))
    return next(parts, model) if inner is model else inner


class _HiddenStates(BaseModelOutputWithPast):  # type: ignore[misc]
    """The output of a backbone that has nothing but last hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def own_head(model: PreTrainedModel) -> Head:
    """Return the part of the model's forward pass after its backbone. Some scale logits, or cap them."""

    inner = [each for each in model.modules() if isinstance(each, PreTrainedModel) and each is not model]

    def head(hidden: Tensor) -> Tensor:
        for each in inner:
            each.forward = lambda *_, **__: _HiddenStates(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        finally:
            for each in inner:
                del each.forward
        return logits

    return head


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
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
