"""A model whose text ends with another token learns from its chat template where an answer ends: what `sft`
exports stops by itself.

The real model is that of $TAILRACE_SMOLLM2 (examples/smollm2/convert.py).
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

from helpers.small_run import write_small_run
from tailrace.cli import main
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = [f"What is {n} + {n % 7}?" for n in range(100, 132)]
"""None of them is trained."""
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as base models are published, whose text ends with <|endoftext|>, after six steps of `sft`."""
    if not (path := os.environ.get("TAILRACE_SMOLLM2")):
        pytest.skip("$TAILRACE_SMOLLM2 is not set")
    config = write_small_run(tmp_path_factory.mktemp("base"))
    base = config.parent / "base"
    shutil.copytree(path, base)
    (base / "chat_template.jinja").write_text(CHATML)
    named = {"config.json": ("eos_token_id", 0), "generation_config.json": ("eos_token_id", 0)}
    for name, (key, end) in (named | {"tokenizer_config.json": ("eos_token", "<|endoftext|>")}).items():
        (base / name).write_text(json.dumps(json.loads((base / name).read_text()) | {key: end}))
    rows = [{"prompt": f"What is {n} + {n % 9}?", "response": f"It is {n + n % 9}."} for n in range(96)]
    (config.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--output-dir", str(config.parent / "sft"), "--model.path", str(base)]
    words += ["--sft.steps", "6", "--sft.rows_per_step", "8", "--sft.eval_every", "0"]
    assert main(["sft", str(config), *words, "--trainer.learning_rate", "2e-5"]) == 0
    return config.parent / "sft" / "model"


@pytest.fixture(scope="module")
def prompts(exported: Path) -> BatchEncoding:
    tokenizer = AutoTokenizer.from_pretrained(exported, padding_side="left")
    asked = [[{"role": "user", "content": text}] for text in ASKED]
    return tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def test_smollm2_stops_by_itself_in_transformers(exported: Path, prompts: BatchEncoding) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    whole = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_TOKENS)
    ends = torch.tensor(model.generation_config.eos_token_id)
    assert torch.isin(whole[:, prompts.input_ids.shape[1] :], ends).any(1).sum() == len(ASKED)


def test_smollm2_stops_by_itself_in_the_embedded_engine(exported: Path, prompts: BatchEncoding) -> None:
    sampling = SamplingSettings(max_completion_tokens=MAX_TOKENS)
    engine = NativeEngine(exported, NativeEngineSettings(dtype="float32"), sampling)
    for n, (ids, mask) in enumerate(zip(prompts.input_ids, prompts.attention_mask, strict=True)):
        engine.submit(GenerationRequest(str(n), ids[mask.bool()].tolist(), [], n, greedy=True))
    reasons = []
    while not engine.idle:
        reasons += [output.finish_reason for output in engine.step()]
    assert reasons.count("stop") == len(ASKED)
