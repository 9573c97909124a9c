"""Models of any architecture train with the embedded engine, and the start says how."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText

from helpers.architectures import SHAPES, SIZES, random_model
from helpers.small_run import EXAMPLES, train_here, write_small_run

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = [
    pytest.param(model_type, marks=pytest.mark.slow)
    for model_type in ("falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "jamba", "mixtral")
]
SLOW += [
    pytest.param(model_type, marks=pytest.mark.slow)
    for model_type in ("nemotron_h", "olmo2", "phi3", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next")
]


def save(folder: Path, model_type: str) -> None:
    """A random model with the quickstart's tokenizer."""
    random_model(model_type, SHAPES[model_type]).save_pretrained(folder)
    for file in (EXAMPLES / "quickstart" / "model").glob("tokenizer*.json"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", *SLOW])
def test_a_model_trains_embedded_and_engine_and_trainer_agree(
    model_type: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "model", model_type)
    config = write_small_run(tmp_path)
    words = ("--model.path", str(tmp_path / "model"), "--run.eval_every", "0", "--run.rounds", "2")
    assert train_here(config, *words) == 0, capfd.readouterr().err
    said = capfd.readouterr().err
    assert (
        f"transformers' own forward pass, slower: model type '{model_type}'; engine.kind = \"vllm\"" in said
    )
    assert "tailrace: the trainer computes samples " in said
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    mismatches = [value for row in rows for name, value in row.items() if "engine_mismatch_kl" in name]
    assert mismatches and max(value for value in mismatches if value is not None) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "text"), [("gemma3", "gemma3_text"), ("qwen3_5", "qwen3_5_text")])
def test_a_checkpoint_of_a_model_that_reads_images_trains_its_text_model(
    model_type: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_attention_heads": 2}
    vision = sizes | {
        "depth": 1,
        "num_hidden_layers": 1,
        "out_hidden_size": 32,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(model_type, text_config=SIZES | SHAPES[text], vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    for file in (EXAMPLES / "quickstart" / "model").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "model")
    words = ("--model.path", str(tmp_path / "model"), "--run.eval_every", "0", "--run.rounds", "2")
    assert train_here(write_small_run(tmp_path), *words) == 0, capfd.readouterr().err


def test_adapters_of_a_model_that_is_served_slowly_are_refused_before_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "model", "lfm2")
    words = ("--model.path", str(tmp_path / "model"), "--trainer.lora.publish", "adapter")
    assert train_here(write_small_run(tmp_path), *words) == 2
    problem = "the embedded engine serves no adapters of a model with model type 'lfm2'; "
    problem += 'write "merged", or engine.kind = "vllm"'
    assert problem in " ".join(capfd.readouterr().err.split())
