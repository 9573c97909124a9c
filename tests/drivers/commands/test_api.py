"""The Python API, in a script and where a loop runs already, as in a notebook."""

import asyncio
import inspect
import json
import pydoc
import subprocess
import sys
import threading
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tailrace
from helpers.small_run import trained_prompts, write_small_run
from tailrace.cli import main
from tailrace.drivers.data.settings import MixtureSettings
from tailrace.importing import import_function
from tailrace.ledger.base import LifeRow
from tailrace.ledger.store import open_store

SIMULATED = """
[run]
rounds = 3
group_size = 4

[schedule]
name = "serial"
groups_per_step = 2
"""


async def one_step_off(run: tailrace.Run, groups_per_step: int) -> None:
    run.declare(staleness=1)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_step - len(run.pool)))
        groups = await run.pool.take(groups_per_step)
        run.pool.launch(run.prompts(groups_per_step))
        await run.train(groups)
        await run.publish()


@pytest.fixture
def config(tmp_path: Path) -> tailrace.RunConfig:
    path = tmp_path / "sim.toml"
    path.write_text(SIMULATED)
    return tailrace.load_config(str(path), {"run.seed": 3})


def test_an_evaluation_returns_the_numbers_that_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, numbers = write_small_run(tmp_path), tmp_path / "eval.json"
    words = ("--prompts", "4", "--samples", "2", "--base", "--json", str(numbers))
    assert main(["eval", str(path), *words]) == 0
    printed = capsys.readouterr().out

    async def cell() -> tailrace.EvaluationSummary:
        return tailrace.evaluate(tailrace.load_config(path), prompts=4, samples=2, base=True)

    result = asyncio.run(cell())
    assert json.loads(msgspec.json.encode(result)) == json.loads(numbers.read_text())
    assert (result.num_samples, result.greedy, result.base) == (8, False, result.reward)
    assert capsys.readouterr().out == printed and f"reward    {result.reward:.4f} over 4" in printed
    with pytest.raises(tailrace.ConfigError, match="there is no run in it; name the output directory"):
        tailrace.evaluate(str(tmp_path))


def test_a_comparison_returns_the_numbers_of_the_command(
    config: tailrace.RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, vary = tmp_path / "numbers.json", "--vary=schedule.groups_per_step=1,2"
    words = ("--run.seed", "3", "--schedules", "serial,april", "--repeats", "2", "--virtual", vary)
    assert main(["compare", str(tmp_path / "sim.toml"), *words, "--json", str(numbers)]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "race"
    given: dict[str, Any] = {"schedules": ["serial", "april"], "vary": {"schedule.groups_per_step": [1, 2]}}
    raced = tailrace.compare(config, **given, repeats=2, virtual=True, output_dir=folder)
    assert msgspec.to_builtins(raced) == {**json.loads(numbers.read_text()), "runs": {}}
    assert len(raced.schedules) == 4 and len(raced.schedules["april groups_per_step=1"]["laps"]) == 2
    assert capsys.readouterr().out.startswith(printed) and printed.startswith(raced.verdict)
    given["schedules"] = "serial,april"
    assert tailrace.compare(config, **given, repeats=2, virtual=True) == raced
    folders = [folder / "serial groups_per_step=1", folder / "serial groups_per_step=2"]
    assert main(["compare", *map(str, folders), "--json", str(numbers)]) == 0
    finished = tailrace.compare(*folders)
    assert {"verdict": finished.verdict, "runs": finished.runs} == json.loads(numbers.read_text())
    assert (finished.schedules, finished.bound_s, len(finished.runs)) == ({}, None, 2)


def test_a_config_is_loaded_with_values_in_place_of_its_own(config: tailrace.RunConfig) -> None:
    assert (config.run.rounds, config.run.seed) == (3, 3)


def test_a_schedule_is_written_and_simulated_in_a_notebook(config: tailrace.RunConfig) -> None:
    async def cell() -> tailrace.RunSummary:
        return tailrace.simulate(config, schedule=one_step_off)

    summary = asyncio.run(cell())
    assert (summary.rounds, summary.steps, summary.groups.trained) == (3, 3, 6)
    assert tailrace.simulate(config, schedule=one_step_off) == summary


def test_a_run_in_a_notebook_leaves_everything_about_itself_in_its_output_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = tailrace.load_config(write_small_run(tmp_path)), tmp_path / "out"

    async def mine(run: tailrace.Run, groups_per_round: int, groups_per_step: int) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(groups_per_round))
            for _ in range(groups_per_round // groups_per_step):
                await run.train(await run.pool.take(groups_per_step))
            await run.publish()

    async def cell() -> tailrace.RunSummary:
        return tailrace.train(config, folder, schedule=mine)

    summary = asyncio.run(cell())
    assert json.loads((folder / "summary.json").read_text()) == msgspec.to_builtins(summary)
    assert msgspec.to_builtins(summary.groups) == {
        "trained": 12, "filtered": 0, "dropped": 0, "reasons": {}, "parked": 0
    }  # fmt: skip
    assert summary.steps == 6
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(12)}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert b'"BooksClosed"' in (folder / "events.jsonl").read_bytes()
    logs = {"engine-0.log", "trainer.log", "scorer-0.log"}
    assert {path.name for path in (folder / "logs").iterdir()} == logs
    schedule = tailrace.load_config(folder / "config.toml").schedule
    assert schedule["name"].startswith("test_api:") and schedule["groups_per_round"] == 4
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-6:])
    assert said["events"].split()[0] == str(folder / "events.jsonl")
    assert said["model"] == str(folder / "model")
    rewards = [row["round/reward"] for row in steps if "round/reward" in row]
    assert said["reward"].startswith(f"{rewards[0]:.3f} -> {rewards[-1]:.3f}  ")
    assert said["best"].startswith("checkpoints/round_00000")


def test_a_function_gets_the_keys_that_it_has_and_a_key_of_neither_schedule_is_refused(
    config: tailrace.RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = {"name": "rolloutpipe", "groups_per_round": 4, "groups_per_step": 2, "order": "longest_first"}
    summary = tailrace.simulate(config.changed(schedule=pipe), schedule=one_step_off)
    assert (summary.steps, summary.groups.trained) == (3, 6)
    assert "one_step_off': without groups_per_round = 4; run.rounds stays 3" in capsys.readouterr().err
    odd = config.changed(schedule={"name": "serial", "groups_per_stp": 2})
    with pytest.raises(tailrace.ConfigError, match=r"schedule\.groups_per_stp = 2: neither serial nor"):
        tailrace.simulate(odd, schedule=one_step_off)


def test_a_function_that_is_not_async_is_refused(config: tailrace.RunConfig) -> None:
    with pytest.raises(tailrace.ConfigError, match="it is not an async function; write `async def`"):
        tailrace.simulate(config, schedule=lambda run: None)  # type: ignore[arg-type, return-value]


def test_the_package_exports_its_names_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, tailrace\n"
        "loaded = [m for m in ('torch', 'transformers', 'pydantic', 'numpy', 'rich') if m in sys.modules]\n"
        "from tailrace import *\n"
        "print(loaded, [n for n in tailrace.__all__ if n not in globals()], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] [] False\n"
    with pytest.raises(AttributeError, match="module 'tailrace' has no attribute 'nonsense'"):
        _ = tailrace.nonsense


def test_help_begins_with_the_functions_and_dir_has_what_the_package_exports() -> None:
    text = pydoc.plain(pydoc.render_doc(tailrace))
    head = text[: text.index("CLASSES")]
    functions = [name for name in tailrace.__all__ if inspect.isfunction(getattr(tailrace, name))]
    assert all(f"    {name}(" in head for name in functions) and len(head.splitlines()) < 60
    assert {name for name in dir(tailrace) if name[:2] != "__"} == {*tailrace.__all__}


def test_rows_are_given_from_python_and_a_resumed_run_needs_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{n % 10} + {n % 7} =\n", "n": n} for n in range(60)]
    tree = tomllib.loads(write_small_run(tmp_path).read_text())
    tree["data"] = {"kind": "rows", "path": "nowhere.jsonl", "prompt_column": "question"}
    tree["reward"]["function"] = f"{tmp_path}/rewards.py:digits"
    config, folder, events = tailrace.load_config(tree, {"run.rounds": 1}), tmp_path / "out", []
    tailrace.train(config, folder, data=datasets.Dataset.from_list(rows), on=events.append)
    assert [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()] == rows
    assert [type(each).__name__ for each in events].count("Stepped") == 2
    moved = folder.rename(tmp_path / "moved")
    more = config.changed(run={"rounds": 2})
    with pytest.raises(
        tailrace.ConfigError, match="data = 'these rows': the run was begun with others; give"
    ):
        tailrace.train(more, moved, data=rows[1:], resume=True)
    summary = tailrace.train(more, moved, data=rows, resume=True, on=lambda event: 1 / 0)
    assert summary.rounds == 2 and {*trained_prompts(moved)} == {*range(8)}
    assert "Sink on is disabled" in capsys.readouterr().out
    kept = tailrace.load_config(moved / "config.toml")
    assert kept.data and kept.data.path == moved / "rows.jsonl"  # type: ignore[attr-defined]
    with closing(open_store(kept.ledger, moved, only_read=True)) as store:
        assert [[*map(str, life.inputs)].count("rows.jsonl") for life in store.rows(LifeRow)] == [1, 1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"prompt": "a"}, {"prompt": object()}], "data = 'row 1': it is no JSON object"),
        ({"train": []}, "data = 'row 0': it is no JSON object .* of several splits, one"),
        ([], "data = 'no rows': there is nothing to train on; give rows"),
    ],
)
def test_rows_that_are_none_are_refused(
    config: tailrace.RunConfig, tmp_path: Path, data: Any, said: str
) -> None:
    with pytest.raises(tailrace.ConfigError, match=said):
        tailrace.train(config, tmp_path / "out", data=data)
    other = config.changed(data=MixtureSettings(sources=({"kind": "rows", "name": "a", "path": "a"},)))  # type: ignore[arg-type]
    with pytest.raises(
        tailrace.ConfigError, match=r"data\.kind = 'mixture': data = gives rows, and the config"
    ):
        tailrace.train(other, tmp_path / "out", data=[{"prompt": "a"}])


SCRIPT = """
import re
import sys

import tailrace

DIGITS = re.compile(r"[0-9]")

def count(text):
    return len(DIGITS.findall(text))

def score(completion):
    return 0.5 + count(completion)

tailrace.train(tailrace.load_config(sys.argv[1], {"run.rounds": 1}), sys.argv[2], reward=score)
"""


def rewards_are(folder: Path, offset: float, round: int = 0) -> bool:
    """Whether each sample was rewarded with the number of its digits and the offset."""
    lines = (folder / "samples" / f"round_{round:06}.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    found = [(each["reward"], offset + sum(map(str.isdigit, each["text"]))) for each in samples]
    return bool(found) and all(given == expected for given, expected in found)


@pytest.mark.slow  # two processes import torch; the function of a cell takes the same way
def test_a_reward_function_of_a_script_scores_and_is_found_again_by_its_run_where_it_is_moved(
    tmp_path: Path,
) -> None:
    """The script has no guard: another process that imported it would train again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(write_small_run(tmp_path)), "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rewards_are(tmp_path / "out", 0.5)
    spec = tailrace.load_config(tmp_path / "out" / "config.toml").reward.function
    assert spec == f"{tmp_path}/out/reward.pkl:score"
    assert import_function(spec, "reward.function")("a1b2") == 2.5
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    config = tailrace.load_config(moved / "config.toml", {"run.rounds": 2})
    assert tailrace.train(config, moved, resume=True).rounds == 2
    assert rewards_are(moved, 0.5, round=1)
    assert "/out" not in (moved / "config.toml").read_text()


def test_a_reward_function_of_a_cell_may_be_a_closure(tmp_path: Path) -> None:
    cell = """
def make(offset):
    return lambda completion: offset + sum(letter.isdigit() for letter in completion)
async def train():
    return tailrace.train(config, folder, reward=make(0.25))
"""
    config, folder = tailrace.load_config(write_small_run(tmp_path), {"run.rounds": 1}), tmp_path / "out"
    names: dict[str, Any] = {"__name__": "__main__", "tailrace": tailrace, "config": config, "folder": folder}
    exec(cell, names)
    assert asyncio.run(names["train"]()).rounds == 1
    assert rewards_are(folder, 0.25)
    with pytest.raises(tailrace.ConfigError, match="it holds a run already"):
        tailrace.train(config, folder, reward=lambda completion: 1.0)
    spec = tailrace.load_config(folder / "config.toml").reward.function
    assert spec and import_function(spec, "reward.function")("1") == 1.25


def test_a_reward_function_that_only_this_process_can_call_is_refused(tmp_path: Path) -> None:
    config = tailrace.load_config(write_small_run(tmp_path))
    lock = threading.Lock()
    with pytest.raises(tailrace.ConfigError, match=r"reward = .*it cannot be sent to another process"):
        tailrace.train(config, tmp_path / "out", reward=lambda completion: float(lock.locked()))
    with pytest.raises(tailrace.ConfigError, match=r"'answer' is no column"):
        tailrace.train(config, tmp_path / "out", reward=lambda completion, answer: 1.0)
    assert not (tmp_path / "out").exists()


def test_sections_in_python_are_read_as_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_path = write_small_run(tmp_path)
    sections = tomllib.loads(config_path.read_text(encoding="utf-8"))
    monkeypatch.chdir(config_path.parent)
    assert tailrace.load_config(sections) == tailrace.load_config(config_path)
    assert sections["data"]["path"] == "rows.jsonl", "the mapping is not changed"
    with pytest.raises(tailrace.ConfigError, match=r"run\.round = 3: there is no such key"):
        tailrace.load_config({**sections, "run": {"round": 3}})
