"""The Python API, in a script and where a loop runs already, as in a notebook."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import write_small_run

import tailrace

SIMULATED = """
[run]
rounds = 3
group_size = 4

[schedule]
name = "serial"
groups_per_step = 2
"""


async def one_step_off(run: tailrace.Run, groups_per_step: int) -> None:
    run.promise(staleness=1)
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


def test_a_config_is_loaded_with_values_in_place_of_its_own(config: tailrace.RunConfig) -> None:
    assert (config.run.rounds, config.run.seed) == (3, 3)


def test_a_schedule_is_written_and_simulated_in_a_notebook(config: tailrace.RunConfig) -> None:
    async def cell() -> tailrace.RunSummary:
        return tailrace.simulate(config, schedule=one_step_off)

    summary = asyncio.run(cell())
    assert (summary.rounds, summary.steps, summary.groups.trained) == (3, 3, 6)
    assert tailrace.simulate(config, schedule=one_step_off) == summary


def test_a_schedule_is_written_and_trained_with_in_a_notebook(tmp_path: Path) -> None:
    path, folder = write_small_run(tmp_path), tmp_path / "out"
    overrides = {"run.rounds": 2, "run.eval_every": 0, "run.checkpoint_every": 0}
    path.write_text(path.read_text().replace("groups_per_round = 4\n", ""))
    config = tailrace.load_config(path, overrides)

    async def cell() -> tailrace.RunSummary:
        return tailrace.train(config, folder, schedule=one_step_off)

    summary = asyncio.run(cell())
    assert (summary.steps, summary.groups.trained, summary.groups.parked) == (2, 4, 2)
    assert (folder / "model" / "model.safetensors").exists()
    recorded = tailrace.load_config(folder / "config.toml")
    assert recorded.schedule == {"name": "test_api:one_step_off", "groups_per_step": 2}


def test_parameters_that_the_function_lacks_are_refused(config: tailrace.RunConfig) -> None:
    async def without_parameters(run: tailrace.Run) -> None:
        run.promise(staleness=0)

    with pytest.raises(
        tailrace.ConfigError, match=r"schedule\.groups_per_step = 2: the schedule has no such"
    ):
        tailrace.simulate(config, schedule=without_parameters)


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
