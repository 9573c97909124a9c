"""Runs with one planted cause each: the diagnosis names it, and its parts are the log-ratio of the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.small_run import train_here, write_small_run
from tailrace.cli import main

KEPT = '''
from tailrace.types import SamplingParams


async def kept(run, groups: int, kv="keep"):
    """Responses are stopped after their first tokens, and go on with new weights over the old KV cache."""
    run.declare(staleness=1)
    async for _ in run.rounds():
        finished = await run.pool.take(len(run.pool))
        brief, *long = run.prompts(1 + groups)
        for group in (brief, *long):
            limit = SamplingParams(1 if group is brief else 320, ignore_end_of_text=True)
            for sample in group.samples:
                sample.sampling = limit
        run.pool.launch([brief, *long])
        async for ended in run.pool.race(1):
            finished += ended
        await run.train(finished)
        await run.publish(kv=kv)
        run.pool.launch(run.parked.pop(groups))
'''
SCHEDULE = 'name = "rolloutpipe"\ngroups_per_round = 4\ngroups_per_step = 2'


def with_schedule(config: Path, schedule: str) -> Path:
    config.write_text(config.read_text().replace(SCHEDULE, schedule))
    return config


def diagnosed(config: Path, *words: str) -> dict[str, Any]:
    """The figures of the only schedule, whose parts must be those that the run measured."""
    path = config.parent / "figures.json"
    assert main(["diagnose", str(config), "--json", str(path), *words]) == 0
    (figures,) = json.loads(path.read_text()).values()
    whole: dict[str, float] = figures["tenths"]["all"]
    assert whole["numerics"] + whole["kv"] + whole["lag"] == pytest.approx(whole["kl"], rel=1e-6)
    assert abs(figures["off"]) < 0.05
    tenths = [row for label, row in figures["tenths"].items() if label != "all"]
    assert sum(row["tokens"] for row in tenths) == whole["tokens"]
    for cause in ("kl", "numerics", "kv", "lag"):
        added_up = sum(row[cause] * row["tokens"] for row in tenths)
        assert added_up == pytest.approx(whole[cause] * whole["tokens"], rel=1e-6, abs=1e-12)
    return dict(figures)


def test_numerics_of_a_bfloat16_engine_are_named(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rounds", "4", "--engine.dtype", "bfloat16", "--trainer.learning_rate", "1e-6"]
    figures = diagnosed(config_path, *words)
    assert figures["cause"].startswith("numerics")
    assert "engine.dtype" in figures["set"] and "now bfloat16 and float32" in figures["set"]
    kl = figures["tenths"]["all"]["kl"]
    assert figures["experiments"]["learning rate 0"]["kl"] > kl / 4, "it stays without any learning"
    assert figures["experiments"]["fresh samples"]["kl"] > kl / 10, "and with fresh samples"
    assert "cause     numerics" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kept_kv_cache_is_named(tmp_path: Path) -> None:
    """Long prompts, whose keys and values are those of older weights."""
    config = with_schedule(write_small_run(tmp_path), 'name = "kept.py:kept"\ngroups = 24')
    (tmp_path / "kept.py").write_text(KEPT)
    terms = [[str((7 * n * k + k) % 10) for k in range(1, 40)] for n in range(60)]
    rows = [json.dumps({"prompt": f"{' + '.join(each)} =\n"}) for each in terms]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    words = ["--rounds", "4", "--trainer.learning_rate", "3e-3", "--sampling.max_completion_tokens", "320"]
    figures = diagnosed(config, *words)
    whole = figures["tenths"]["all"]
    assert figures["cause"].startswith("kv") and "schedule.kv" in figures["set"]
    assert whole["kv"] > 10 * abs(whole["numerics"])
    # How many tokens a response has when it is stopped is a matter of time, so a second run has another lag.
    assert figures["experiments"]["recomputed KV"]["left"] < whole["kl"] / 2, "it goes with the old KV cache"
    assert abs(figures["kv_floor"]) < 1e-6


@pytest.mark.slow
def test_a_lag_of_16_is_named(config_path: Path) -> None:
    lagging = 'name = "tailrace"\ngroups_per_step = 1\nstaleness = 16\ngroups_in_flight = 17'
    config = with_schedule(config_path, lagging)
    figures = diagnosed(config, "--rounds", "24", "--trainer.learning_rate", "1e-3")
    whole = figures["tenths"]["all"]
    assert figures["cause"].startswith("lag") and "schedule.staleness" in figures["set"]
    assert whole["lag"] > 0.9 * whole["kl"]
    for experiment in ("learning rate 0", "fresh samples"):
        assert figures["experiments"][experiment]["kl"] < 1e-6, "it goes with the lag"


def test_a_run_is_diagnosed_from_its_checkpoint(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(config_path, "--run.rounds", "2", "--run.eval_every", "0") == 0
    capsys.readouterr()
    assert main(["diagnose", str(config_path.parent / "out"), "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the run   mismatch_kl ") and "of the trained tokens follow tokens of" in said
    assert "learning rate 0: KL" in said


def test_a_run_without_trained_samples_is_refused(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_path.parent / "out"
    folder.mkdir()
    (folder / "config.toml").write_text(config_path.read_text())
    assert main(["diagnose", str(folder)]) == 2
    assert "the run has trained no sample yet; let it train" in capsys.readouterr().err


def test_a_simulated_config_is_refused(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config_path.read_text()
    config_path.write_text(text[: text.index("[model]")])
    assert main(["diagnose", str(config_path)]) == 2
    assert "model = None: this command needs the section; add [model]" in capsys.readouterr().err


def test_a_server_that_cannot_score_is_refused(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--engine.kind", "sglang", "--engine.urls", '["http://127.0.0.1:9"]']
    assert main(["diagnose", str(config_path), *server]) == 2
    refused = "engine.kind = 'sglang': such an engine does not score a given sequence"
    assert refused in capsys.readouterr().err
