"""A replay trains the recorded samples of a run without engines, to the same gradients bit for bit."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from helpers.small_run import EXAMPLES, train_here, write_small_run
from tailrace.cli import main
from tailrace.ledger.base import LifeRow, RunRow, TokensRow, TrainingRow, Transaction
from tailrace.ledger.store import LEDGER_FILE, Store
from tailrace.types import SampleId

KEPT = ["--ledger.keep_tokens", "true", "--run.eval_every", "0"]
OF_TRAINING = ("loss", "grad_norm", "entropy", "kl", "mismatch_kl", "reward", "tokens/trained")


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row.get(name) for name in OF_TRAINING} for row in rows if "loss" in row]


def trainings(store: Store) -> list[tuple[SampleId, int, int]]:
    """Each trained sample with its step and its masked tokens."""
    return sorted((row.id, row.step, row.masked) for row in store.rows(TrainingRow))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def trained_tokens(folder: Path) -> dict[SampleId, tuple[bytes, bytes]]:
    """Token ids and log-probs of each trained sample."""
    with closing(Store.open(folder / LEDGER_FILE)) as store:
        rows, trained = store.rows(TokensRow), {row.id for row in store.rows(TrainingRow)}
    return {
        id: (
            b"".join(row.ids for row in rows if row.id == id),
            b"".join(row.logprobs for row in rows if row.id == id),
        )
        for id in trained
    }


def replay(config: Path, run: Path, *words: str, out: str = "replay") -> int:
    where = ["--output-dir", str(config.parent / out), "--replay", str(run)]
    return main(["train", str(config), *where, *KEPT, *words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run with stale tokens, which was resumed; it is in `out` beside it."""
    config = write_small_run(tmp_path_factory.mktemp("recorded"))
    text = config.read_text().replace('name = "rolloutpipe"\ngroups_per_round = 4\n', 'name = "pipelinerl"\n')
    more = "groups_per_step = 2\nin_flight_per_engine = 8\nring_groups = 4\nstaleness = 1"
    config.write_text(text.replace("groups_per_step = 2", more))
    words = [*KEPT, "--trainer.learning_rate", "1e-3"]
    assert train_here(config, *words, "--run.rounds", "2") == 0
    assert train_here(config, *words, "--resume") == 0
    return config


def test_the_same_settings_give_the_same_gradients_bit_for_bit(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = recorded.parent / "out", recorded.parent / "replay"
    assert replay(recorded, out, "--trainer.learning_rate", "1e-3") == 0
    assert len(steps(out)) >= 3
    assert steps(found) == steps(out)
    ours, others = weights(found), weights(out)
    assert all(torch.equal(ours[name], others[name]) for name in others)
    with closing(Store.open(found / LEDGER_FILE)) as store, closing(Store.open(out / LEDGER_FILE)) as first:
        assert json.loads(store.rows(LifeRow)[0].config)["run"]["replay"] == str(out)
        assert trainings(store) == trainings(first)
        assert len(store.rows(LifeRow)) == 1 and len(first.rows(LifeRow)) == 2
        assert store.rows(RunRow)[0].num_drawn == len({row.prompt for row in store.rows(TrainingRow)})
    assert not (found / "logs" / "engine-0.log").exists()
    capsys.readouterr()
    assert main(["inspect", str(found)]) == 0
    assert f"replay    the samples are those of {out}" in capsys.readouterr().out


def test_another_loss_rate_and_number_of_steps_train_the_same_samples(recorded: Path) -> None:
    out, found = recorded.parent / "out", recorded.parent / "other"
    words = ["--algorithm.loss", "reinforce", "--schedule.groups_per_step", "1"]
    assert replay(recorded, out, *words, out="other") == 0
    assert len(steps(found)) == 2 * len(steps(out))
    assert trained_tokens(found) == trained_tokens(out)


def test_a_replay_that_begins_again_counts_the_same_staleness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a kill: of the checkpoints of a replay only the one before its first step is there."""
    config = write_small_run(tmp_path)
    config.write_text(config.read_text().replace('name = "rolloutpipe"', 'name = "serial"'))
    out, found = tmp_path / "out", tmp_path / "replay"
    words = ["--schedule.groups_per_round", "2", "--run.rounds", "2"]
    assert train_here(config, *KEPT, *words) == 0
    assert replay(config, out, *words) == 0
    for checkpoint in (found / "checkpoints").iterdir():
        if checkpoint.name != "round_000000":
            shutil.rmtree(checkpoint)
    assert replay(config, out, *words, "--resume") == 0
    assert "resumed from round_000000, step 0" in capsys.readouterr().err
    rows = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness/max"] for row in rows if "loss" in row] == [0, 0]
    assert all(torch.equal(each, weights(found)[name]) for name, each in weights(out).items())


@pytest.mark.slow
def test_a_killed_replay_goes_on(recorded: Path) -> None:
    out, killed = recorded.parent / "out", recorded.parent / "killed"
    words = ["--output-dir", str(killed), "--replay", str(out), *KEPT, "--trainer.learning_rate", "1e-3"]
    command = [sys.executable, "-m", "tailrace.cli", "train", str(recorded), *words]
    process = subprocess.Popen(command)
    end_s = time.monotonic() + 120
    while not (killed / "checkpoints" / "round_000001").exists():
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(["train", str(recorded), *words, "--resume"]) == 0
    assert all(torch.equal(each, weights(killed)[name]) for name, each in weights(out).items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--sampling.max_completion_tokens", "9"],
            "the samples of {out} were recorded with 12; change it back",
        ),
        (["--algorithm.kl_coef", "0.1"], "the recorded samples have no log-probs of a reference model"),
    ],
)
def test_settings_that_the_samples_do_not_have_are_one_message(
    recorded: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    out = recorded.parent / "out"
    assert replay(recorded, out, *words, out="refused") == 2
    assert said.format(out=out) in capsys.readouterr().err
    assert not (recorded.parent / "refused").exists()


def test_a_run_whose_samples_are_gone_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_small_run(tmp_path)
    assert train_here(config, "--run.eval_every", "0", "--run.rounds", "2") == 0
    assert replay(config, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "of its 16 trained samples are gone" in said
    assert "record a run with ledger.keep_tokens = true" in said
    shutil.rmtree(tmp_path / "out")
    assert replay(config, tmp_path / "out") == 2
    assert "name the output directory of a run of tailrace train" in capsys.readouterr().err


TELLS_DATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if messages[-1]['role'] == 'user' %}"
    "{{ strftime_now('%d') }} ={% endif %}"
)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the day of November that the clock tells tailrace and the chat templates of transformers."""

    class Clock(datetime):
        told = 1

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 11, cls.told, 12)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    monkeypatch.setattr("tailrace.clock.wall_time", lambda: Clock.now().timestamp())
    return lambda told: setattr(Clock, "told", told)


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """The config of a serial run whose chat template tells the date."""
    config = write_small_run(tmp_path)
    shutil.copytree(EXAMPLES / "quickstart" / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TELLS_DATE)
    text = config.read_text().replace('name = "rolloutpipe"', 'name = "serial"')
    config.write_text(text.replace(str(EXAMPLES / "quickstart" / "model"), str(tmp_path / "model")))
    return config


def texts(folder: Path, kind: str = "") -> set[str]:
    """What the prompts of a run end with, of its training or of its evaluations."""
    files = (folder / "samples" / kind).glob("round_*.jsonl")
    lines = (line for file in files for line in file.read_text().splitlines())
    return {json.loads(line)["prompt"][-4:] for line in lines}


def test_a_replay_on_another_day_has_the_prompts_of_its_run_or_of_the_day_that_the_user_names(
    dated: Path, day: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A release kept no day: there the user names it."""
    out, once = dated.parent / "out", ["--run.rounds", "1"]
    day(28)
    assert train_here(dated, *KEPT, *once) == 0
    day(29)
    assert replay(dated, out, *once, out="first") == 0
    assert texts(dated.parent / "first") == texts(out) == {"28 ="}
    assert max(each["mismatch_kl"] for each in steps(dated.parent / "first")) < 1e-5
    assert replay(dated, out, *once, "--model.template_date", "2026-11-29", out="other") == 2
    (out / "config.toml").write_text((out / "config.toml").read_text().replace("template_date = ", "# "))
    with closing(Store.open(out / LEDGER_FILE)) as store:
        (life,) = store.rows(LifeRow)
        store.commit(Transaction([structs.replace(life, config=life.config.replace('"2026-11-28"', "null"))]))
    capsys.readouterr()
    assert replay(dated, out, *once) == 2
    said = "model.template_date = '2026-11-29': the samples of"
    assert said in (err := capsys.readouterr().err) and "name the day on which it was recorded" in err
    assert replay(dated, out, *once, "--model.template_date", "2026-11-28") == 0
    assert texts(dated.parent / "replay") == texts(out) == {"28 ="}


@pytest.mark.slow
def test_a_run_that_is_resumed_on_another_day_tells_its_first_day_in_all_prompts(
    dated: Path, day: Callable[[int], None]
) -> None:
    every = ["--run.eval_every", "1"]
    day(28)
    assert train_here(dated, *every, "--run.rounds", "1") == 0
    day(29)
    assert train_here(dated, *every, "--run.rounds", "2", "--resume") == 0
    out = dated.parent / "out"
    assert texts(out) == texts(out, "eval") == {"28 ="}
    assert steps(out) and len(list((out / "samples").glob("round_*.jsonl"))) == 2


@pytest.mark.slow
def test_an_evaluation_of_a_run_on_another_day_asks_what_the_run_asked(
    dated: Path, day: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    day(28)
    assert train_here(dated, *KEPT, "--run.rounds", "1") == 0
    day(29)
    capsys.readouterr()
    assert main(["eval", str(dated.parent / "out"), "--prompts", "2"]) == 0
    told = capsys.readouterr().out
    assert "28 =" in told and "29 =" not in told
