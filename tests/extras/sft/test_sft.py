"""Supervised fine-tuning: its loss is transformers' own, and a killed run ends as one that was not."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

import tailrace
from helpers.processes import worker_of
from helpers.small_run import EXAMPLES, train_here, write_small_run
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.assembly import resumption
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.checksums import verify
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.extras.sft.command import CROSS_ENTROPY
from tailrace.extras.sft.rows import ResponseRows
from tailrace.model_folder import end_of_text_ids
from tailrace.record.summary import FirstLast
from tailrace.types import Sample

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}=\n{% else %}<eos>{% endif %}"
    "{% endfor %}"
)
TIMES = ("time", "time/step", "wall_time")
SETTINGS = """
[sft]
steps = 4
rows_per_step = 8
eval_every = 2
eval_rows = 4
checkpoint_every = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config with rows that have responses."""
    path = write_small_run(tmp_path)
    rows = [{"prompt": f"{n} + {n % 7} =\n", "response": str(n + n % 7)} for n in range(60)]
    write_rows(path, rows)
    path.write_text(path.read_text() + SETTINGS)
    return path


def write_rows(config: Path, rows: list[dict[str, Any]]) -> None:
    (config.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(config: Path, *words: str, out: str = "sft") -> int:
    return main(["sft", str(config), "--output-dir", str(config.parent / out), *words])


def metrics(config: Path, out: str = "sft") -> list[dict[str, float]]:
    lines = (config.parent / out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def rows_of(config: Path, *words: str) -> ResponseRows:
    overrides = dict(zip(words[::2], words[1::2], strict=True))
    loaded = load_config(config, overrides)
    assert loaded.model
    return ResponseRows(loaded, load_tokenizer(loaded.model.path), "train")


def loss_of_transformers(folder: Path, samples: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """The model's own loss over right-padded sequences, with labels of the responses only, and gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = [[*each.prompt.ids, *each.completion_ids] for each in samples]
    length = max(map(len, sequences))
    ids = torch.tensor([each + [0] * (length - len(each)) for each in sequences])
    mask = torch.tensor([[1] * len(each) + [0] * (length - len(each)) for each in sequences])
    labels = [
        [-100] * len(each.prompt.ids) + each.completion_ids + [-100] * (length - len(whole))
        for each, whole in zip(samples, sequences, strict=True)
    ]
    loss = model(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def model_with_template(folder: Path, template: str = TEMPLATE) -> Path:
    """The quickstart's model with a chat template."""
    shutil.copytree(EXAMPLES / "quickstart" / "model", folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["prompt and response", "messages", "completion messages"])
def test_loss_and_gradients_are_those_of_transformers(config: Path, kind: str) -> None:
    model, words = EXAMPLES / "quickstart" / "model", []
    if kind != "prompt and response":
        asked = [[{"role": "user", "content": f"{n} + {n % 9}"}] for n in range(40)]
        given = [[{"role": "assistant", "content": str(n + n % 9)}] for n in range(40)]
        model = model_with_template(config.parent / "model")
        words = ["model.path", str(model)]
        rows: list[dict[str, Any]] = [{"prompt": p, "response": r} for p, r in zip(asked, given, strict=True)]
        if kind == "messages":
            rows = [{"messages": p + r} for p, r in zip(asked, given, strict=True)]
            words += ["data.prompt_column", "messages"]
        write_rows(config, rows)
    samples = rows_of(config, *words).take(0, 8)[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    if kind == "prompt and response":
        assert all(each.completion_ids[-1] == tokenizer.eos_token_id for each in samples)
    else:
        for each in samples:
            a, b = (int(n) for n in each.prompt.text.removesuffix("=\n").split(" + "))
            whole = [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": str(a + b)}]
            ids = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
            assert [*each.prompt.ids, *each.completion_ids] == ids
    loss, gradients = loss_of_transformers(model, samples)
    settings = TrainerSettings(dtype="float32", threads=1, max_tokens_per_microbatch=24, max_grad_norm=1e9)
    trainer = TorchTrainer(model, settings, CROSS_ENTROPY, SamplingSettings())
    trainer.accumulate([[TrainingSample.of(each)] for each in samples])
    trainer._compute_waiting()
    count = sum(each.num_tokens for each in samples)
    ours = {name: p.grad / count for name, p in trainer._policy.parameters().items() if p.grad is not None}
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)
    stats = trainer.step()
    assert stats.loss == pytest.approx(loss, abs=1e-6)
    assert stats.num_micro_batches > 1


def test_a_run_learns_evaluates_and_exports_and_training_goes_on(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(config).take(0, 8)[0]
    first, _ = loss_of_transformers(EXAMPLES / "quickstart" / "model", rows)
    assert sft(config, "--trainer.learning_rate", "3e-3") == 0
    found = metrics(config)
    steps = [row for row in found if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(first, abs=1e-6)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["rows/drawn"] for row in steps] == [8, 16, 24, 32]
    losses = [row["eval/loss"] for row in found if "eval/loss" in row]
    assert [row["step"] for row in found if "eval/loss" in row] == [0, 2, 4]
    assert losses[2] < losses[0]
    out = config.parent / "sft"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["round_000002", "round_000004"]
    held_out = ResponseRows(load_config(config), load_tokenizer(out / "model"), "eval").take(0, 4)[0]
    assert loss_of_transformers(out / "model", held_out)[0] == pytest.approx(losses[2], abs=1e-6)
    capsys.readouterr()
    assert sft(config) == 2
    assert "it holds a run already; add --resume, or choose another" in capsys.readouterr().err
    assert sft(config, "--resume") == 0
    assert metrics(config) == found
    assert train_here(config, "--run.rounds", "1", "--model.path", str(out / "model")) == 0
    assert sft(config, out="out") == 2
    assert "it holds a run of tailrace train; choose another" in capsys.readouterr().err


def test_a_trainer_that_starts_again_without_checkpoints_is_refused(config: Path) -> None:
    assert sft(config, "--trainer.restarts", "1", "--sft.checkpoint_every", "0") == 2


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["controller", "trainer"])
def test_a_killed_run_ends_as_one_that_was_not(config: Path, dies: str) -> None:
    """It is resumed, or its trainer starts again."""
    words = ["--sft.steps", "12", "--sft.checkpoint_every", "3", "--trainer.lora.rank", "2"]
    words += ["--sft.eval_every", "1", "--trainer.restarts", "1"] if dies == "trainer" else []
    assert sft(config, *words, out="whole") == 0
    killed = config.parent / "killed"
    command = ["sft", str(config), "--output-dir", str(killed), *words]
    process = subprocess.Popen([sys.executable, "-m", "tailrace.cli", *command])
    end_s = time.monotonic() + 120
    while not (killed / "checkpoints" / "round_000003").exists():
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid if dies == "controller" else worker_of(process.pid, "trainer"), signal.SIGKILL)
    assert process.wait() == (0 if dies == "trainer" else -signal.SIGKILL)
    assert dies == "trainer" or sft(config, *words, "--resume", out="killed") == 0
    assert metrics(config, "killed") == metrics(config, "whole")
    ours, others = (
        load_file(config.parent / out / "model" / "model.safetensors") for out in ("killed", "whole")
    )
    assert all(torch.equal(ours[name], others[name]) for name in others)


@pytest.mark.slow
def test_a_resumed_run_takes_the_next_rows_also_without_its_metrics_or_newest_checkpoint(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every third row has no response."""
    rows = [{"prompt": f"{n} + 1 =\n"} | ({"response": f"{n + 1}"} if n % 3 else {}) for n in range(90)]
    write_rows(config, rows)
    assert sft(config, "--sft.steps", "8", out="whole") == 0
    assert sft(config, out="cut") == 0
    whole = [row for row in metrics(config, "whole") if "loss" in row]
    for gone, first in {"metrics.jsonl": 4, "checkpoints/round_000004": 2}.items():
        out = config.parent / gone.replace("/", "_")
        shutil.copytree(config.parent / "cut", out)
        (out / gone).unlink() if (out / gone).is_file() else shutil.rmtree(out / gone)
        assert sft(config, "--sft.steps", "8", "--resume", out=out.name) == 0
        assert gone.rpartition("/")[2] in capsys.readouterr().err
        found = [row for row in metrics(config, out.name) if "loss" in row and row["step"] > first]
        assert found == whole[first:]


def test_rows_that_cannot_be_trained_are_counted_and_said_before_the_start(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"prompt": f"{n} + 1 =\n", "response": f"{n + 1}"} for n in range(40)]
    bad = [{"prompt": "1 + 2 =\n", "response": ""}, {"prompt": "1 + 3 =\n"}]
    bad.append({"prompt": "1 + 4 =\n", "response": "5" * 2000})
    write_rows(config, good + bad)
    assert sft(config, "--sft.steps", "5") == 0
    said = capsys.readouterr().err
    assert "an empty response" in said and "no response" in said and "longer than the context" in said
    last = [row for row in metrics(config) if "loss" in row][-1]
    assert last["rows/drawn"] == 40 + last["rows/skipped"]


def test_last_messages_are_divided_from_their_conversations_and_refused_once_an_epoch(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template rewrites what is one text, and leaves out what comes before a semicolon."""
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split(';')[-1].replace('+', ' + ') }}")
    model = model_with_template(config.parent / "model", template)
    answers = [f"{n}+1" if n % 2 else f"1;{n}" for n in range(20)]
    write_rows(
        config,
        [
            {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": answer}]}
            for n, answer in enumerate(answers)
        ],
    )
    words = ["--data.prompt_column", "messages", "--data.eval_path", str(config.parent / "rows.jsonl")]
    words += ["--model.path", str(model), "--sft.steps", "1"]
    samples = rows_of(config, *(word.removeprefix("--") for word in words)).take(0, 10)[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    said = {tokenizer.decode(each.completion_ids) for each in samples}
    assert said == {tokenizer.decode(tokenizer.encode(f"{n} + 1<eos>")) for n in range(1, 20, 2)}
    assert sft(config, *words) == 0
    warning = "these are skipped: 10 a response that would not be trained whole (the first: row "
    assert warning in capsys.readouterr().err


def test_the_model_ends_its_texts_with_what_it_was_taught(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = (
        "{% if m['role'] == 'assistant' %}={{ m['content'] }}<pad>{% else %}{{ m['content'] }}{% endif %}"
    )
    model = model_with_template(config.parent / "model", "{% for m in messages %}" + answers + "{% endfor %}")
    assert end_of_text_ids(model) == {1}
    given = ({"content": f"{n}{'<eos>' * (n % 2)}"} for n in range(40))  # without a role
    write_rows(config, [{"prompt": f"{n} + 1", "response": each} for n, each in enumerate(given)])
    assert sft(config, "--model.path", str(model), "--sft.steps", "1") == 0
    said = capsys.readouterr().err
    assert "no generation prompt: prompts get the assistant's header '='" in said
    assert "are skipped" not in said and "ends turns in the chat template" not in said
    exported, checkpoint = config.parent / "sft" / "model", config.parent / "sft/checkpoints/round_000001"
    for folder in (exported, checkpoint):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 1]
        assert verify(folder, "")
    train = ["train", str(config), "--dry-run", "--output-dir", str(config.parent / "out"), "--model.path"]
    capsys.readouterr()
    assert main([*train, str(exported)]) == 0
    said = capsys.readouterr().err
    assert "was changed after" not in said and "ends turns in the chat template" not in said
    assert main([*train, str(model)]) == 0
    assert "ends turns in the chat template: add 0 to eos_token_id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sft.response_column", "answer"], "have no response to train: no response (the first: row "),
        (["--data.kind", "reasoning_gym", "--data.task", "chain_sum"], "responses are given by rows"),
    ],
)
def test_data_without_responses_are_one_message(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    if "reasoning_gym" in words:
        config.write_text(config.read_text().replace('path = "rows.jsonl"', ""))
    assert sft(config, *words) == 2
    assert said in capsys.readouterr().err
    assert not (config.parent / "sft" / "config.toml").exists()


def test_a_resumed_run_keeps_the_rows_of_its_steps(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It opens its data once: there are no prompts of a schedule to restore."""
    assert sft(config, "--sft.steps", "1") == 0
    monkeypatch.setattr(resumption, "training_prompts", lambda *_: pytest.fail("the data is opened again"))
    assert sft(config, "--sft.steps", "1", "--resume") == 0
    assert sft(config, "--resume", "--sft.rows_per_step", "4") == 2
    assert "sft.rows_per_step = 4: the run was begun with 8" in capsys.readouterr().err


def test_the_config_of_the_run_is_that_of_the_user(config: Path) -> None:
    words = ["--sampling.temperature", "0.7", "--sampling.stop", '["#"]', "--run.checkpoint_every", "5"]
    words += ["--algorithm.name", "dapo", "--weights.probe_every", "3", "--sft.steps", "1"]
    assert sft(config, *words) == 0
    kept = load_config(config.parent / "sft" / "config.toml")
    given = load_config(config, {words[n][2:]: words[n + 1] for n in range(0, len(words), 2)})
    assert kept.sampling == given.sampling and kept.sampling and kept.sampling.max_completion_tokens == 12
    assert (kept.algorithm, kept.weights, kept.run) == (given.algorithm, given.weights, given.run)


@pytest.mark.parametrize(
    "changed", ["rows.jsonl", "model/chat_template.jinja", "model/tokenizer_config.json"]
)
def test_a_resumed_run_notices_changed_inputs_as_train_does(
    config: Path, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also rows that are longer than those before."""
    words = ["--model.path", str(model_with_template(config.parent / "model")), "--sft.steps", "1"]
    assert sft(config, *words) == 0
    path, words = config.parent / changed, [*words[:2], "--sft.steps", "2", "--resume"]
    path.write_text(path.read_text().replace('"response": "1', '"response": "10').replace("=\\n", "=\\n\\n"))
    path.write_text(path.read_text() + "\n")
    assert sft(config, *words) == 2
    said = capsys.readouterr().err
    assert "run.accept_changed_inputs = False: the run was begun with another content of" in said
    assert str(path) in said and len(metrics(config)) == 3
    assert sft(config, *words, "--run.accept_changed_inputs", "true") == 0
    assert [row["step"] for row in metrics(config) if "loss" in row] == [1, 2]


@pytest.mark.parametrize("has_column", [False, True])
def test_a_question_is_trained_or_held_out_with_all_of_its_answers(config: Path, has_column: bool) -> None:
    model = model_with_template(config.parent / "model")
    asked = [[{"role": "user", "content": f"{n % 6} + 1"}] for n in range(60)]
    given = [[{"role": "assistant", "content": str(n)}] for n in range(60)]
    rows: list[dict[str, Any]] = [{"prompt": p + a} for p, a in zip(asked, given, strict=True)]
    if has_column:
        rows = [{"prompt": p, "response": a} for p, a in zip(asked, given, strict=True)]
    write_rows(config, rows)
    loaded = load_config(config, {"model.path": str(model)})
    trained, held_out = (
        {each.prompt.text for each in ResponseRows(loaded, load_tokenizer(model), split).take(0, 60)[0]}
        for split in ("train", "eval")
    )
    assert (len(trained), len(held_out)) == (5, 1) and not trained & held_out


def test_a_run_shows_its_steps_and_what_it_evaluates(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft(config) == 0
    shown = capsys.readouterr().out.splitlines()
    steps, evaluations = ([line for line in shown if line.startswith(what)] for what in ("Step", "Eval"))
    assert len(evaluations) == 3 and evaluations[0].startswith("Evaluation | Step 0 | Loss ")
    rows = [row for row in metrics(config) if "loss" in row]
    for number, (line, row) in enumerate(zip(steps, rows, strict=True), 1):
        parts = line.split(" | ")
        assert parts[:2] == [f"Step {number}", f"Round {number}/4"] and parts[3].startswith("ETA 0:")
        assert parts[2] == f"Loss {row['loss']:.4f}" and parts[4] == f"Rows {8 * number} (0 skipped)"


def test_runs_are_compared_by_their_losses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft(config, out="short") == 0
    assert sft(config, "--trainer.learning_rate", "3e-3", out="fast") == 0
    capsys.readouterr()
    assert main(["compare", str(config.parent / "short"), str(config.parent / "fast")]) == 0
    losses = {out: metrics(config, out)[-1]["eval/loss"] for out in ("short", "fast")}
    (low, lowest), (high, highest) = sorted(losses.items(), key=lambda each: each[1])
    said = f"{low} has the lower held-out loss: {lowest:.4f}, {high} {highest:.4f}"
    assert said in capsys.readouterr().out


def test_python_gets_the_held_out_loss_that_the_command_prints(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft(config) == 0
    printed = capsys.readouterr().out

    async def cell() -> FirstLast | None:
        return tailrace.sft(tailrace.load_config(config), config.parent / "python")

    loss = asyncio.run(cell())
    assert loss and 0 < loss.last < loss.first
    assert f"held-out loss {loss.first:.4f} -> {loss.last:.4f} in 4 steps" in printed
    assert metrics(config, "python") == metrics(config)
    with pytest.raises(tailrace.ConfigError, match="--resume"):
        tailrace.sft(tailrace.load_config(config), config.parent / "python")
    assert tailrace.sft(tailrace.load_config(config), config.parent / "python", resume=True) == loss
