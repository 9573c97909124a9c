"""The comparison with TRL: the parts that need neither TRL nor the model."""

import json
import sys
from pathlib import Path

import pytest

from common import peak_pss
from tailrace.api import load_config
from tailrace.drivers.assembly.schedule import resolve
from trl_peer import CANDIDATES, SUMS, curve_of, figures, main, missing, ratio, tailrace_steps

ROW = {"loss": 0.1, "round/rollout_time_s": 2.0, "tokens/trained": 100, "samples/trained": 64, "reward": 0.5}


def test_steps_have_the_seconds_of_their_own_parts(tmp_path: Path) -> None:
    times = {10.0: 0.0, 20.0: 0.25}
    rows = [{**ROW, "time": time, "frac_reward_zero_std": zero} for time, zero in times.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"eval/reward": 1.0}])))
    spans = [("Accumulated", 3.0, 9.0), ("OptimizerStep", 9.0, 10.0), ("Published", 10.0, 11.0)]
    spans += [("Accumulated", 13.0, 16.0), ("Accumulated", 16.0, 19.0), ("OptimizerStep", 19.0, 20.0)]
    events = [{"event": name, "start_s": start, "end_s": end} for name, start, end in spans]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    found = figures(tailrace_steps(tmp_path))
    assert found["parts"] == {"generation": 2.0, "publish": 1.0, "passes": 6.0, "optimizer": 1.0}
    assert (found["step_s"], found["tokens_s"], found["reward"]) == (10.0, 10.0, [0.5, 0.5])
    assert (found["zero_groups"], found["gradient_s"]) == (0.25, 6 / 48)
    assert found["minutes"] == [0.0, 10 / 60]


def test_a_curve_has_what_learning_py_keeps_of_a_run_of_trl() -> None:
    steps = [{"end_s": 12.0, "tokens": 40, "reward": 0.25}, {"end_s": 15.0, "tokens": 80, "reward": 0.5}]
    curve = curve_of({"begin_s": 10.0, "steps": steps}, 8)
    assert (curve["samples"], curve["generated_tokens"]) == ([8, 16], [40, 120])
    assert (curve["seconds"], curve["length"], curve["reward"]) == ([2.0, 5.0], [5.0, 10.0], [0.25, 0.5])


def test_the_ratio_is_that_of_the_means() -> None:
    runs = {"trl": [{"step_s": 4.0}, {"step_s": 8.0}], "tailrace": [{"step_s": 3.0}]}
    assert ratio(runs, "step_s") == 2.0


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    python, model = tmp_path / "python", tmp_path / "model"
    venv, folder = missing(model, python)
    assert venv == f"{python} is missing: make env-trl"
    assert folder.endswith("config.json is missing: make models/SmolLM2-135M-Instruct")
    python.touch()
    model.mkdir()
    (model / "config.json").touch()
    assert missing(model, python) == []


def test_the_comparison_ends_at_once_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make models/SmolLM2-135M-Instruct"):
        main(model=tmp_path)


@pytest.mark.parametrize("cores", CANDIDATES)
def test_tailrace_takes_the_settings_of_each_candidate(cores: str) -> None:
    for settings in CANDIDATES[cores]["tailrace"]:
        config = load_config(SUMS / "first_run.toml", settings)
        resolve(config)
        assert config.engine.dtype == settings["trainer.dtype"] == config.trainer.dtype


def test_the_peak_of_memory_counts_descendants() -> None:
    held = "block = bytearray(2**26); block[::4096] = b'x' * 2**14; import time; time.sleep(1.5)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}], check=True)"
    assert peak_pss([sys.executable, "-c", child]) >= 2**26


def test_a_command_that_fails_ends_the_benchmark_with_its_status() -> None:
    with pytest.raises(SystemExit, match="3"):
        peak_pss([sys.executable, "-c", "raise SystemExit(3)"])
