"""Folders that do not fit their config: refused by whatever loads the weights, and no code of theirs runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_models import save_tiny_model
from tailrace.drivers.engine.native.model import CausalLM
from tailrace.drivers.models.causal_lm import read_model, read_shape
from tailrace.errors import ConfigError

WEIGHTS = "model.safetensors"
Load = Callable[[Path], object]


def engine_model(folder: Path) -> CausalLM:
    return CausalLM(folder, max_tokens=64, device=torch.device("cpu"), dtype=torch.float32)


LOADERS = pytest.mark.parametrize("load", [read_model, engine_model])


def folder_with(folder: Path, *names: str) -> Path:
    """A Qwen3 whose files have other tensors, too."""
    save_tiny_model(folder)
    more = {name: torch.ones(2, 2) for name in names}
    save_file(load_file(folder / WEIGHTS) | more, folder / WEIGHTS, {"format": "pt"})
    return folder


@LOADERS
def test_weights_for_which_the_described_model_has_no_place_are_refused(tmp_path: Path, load: Load) -> None:
    biases = [f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in "qk"]
    with pytest.raises(ConfigError) as caught:
        load(folder_with(tmp_path / "model", *biases))
    assert caught.value.problem == (
        "config.json: the model that it describes has no place for 4 weights (model.layers.0.self_attn."
        "k_proj.bias, model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.k_proj.bias, ...)"
    )
    remedy = "put the weights' own config.json into the folder, or remove a value head or a classifier"
    assert caught.value.remedy == remedy


@LOADERS
def test_drafts_parts_for_images_and_computed_buffers_are_left_out(tmp_path: Path, load: Load) -> None:
    names = ["mtp.layers.0.self_attn.q_proj.weight", "model.visual.blocks.0.attn.qkv.weight"]
    load(folder_with(tmp_path / "model", *names, "model.layers.0.self_attn.rotary_emb.inv_freq"))


@pytest.mark.parametrize("load", [read_model, read_shape])
def test_code_of_a_folder_is_neither_run_nor_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    folder, ran = folder_with(tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": places}))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    with pytest.raises(ConfigError, match="auto_map: it needs code in its folder, which is not run"):
        load(folder)
    assert asked == [] and not ran.exists()
