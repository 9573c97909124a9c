"""The script for one card runs to its end without one, in little."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import one_gpu
from one_gpu import CAPS, HERE, PARTS, Part, main, measure_all


def test_each_part_runs_on_a_cpu_and_leaves_its_figures(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--json", str(tmp_path / "found.json")]
    subprocess.run(
        ["bash", HERE / "one_gpu.sh", *words],
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["card"], found["tiny"]) == ("cpu", True)
    parts = {name: each["results"] for name, each in found["parts"].items() if each["exit"] == "0"}
    assert parts.keys() == PARTS.keys()
    assert [(row["cap_gib"], row["kind"]) for row in parts["memory"]] == [
        (cap, kind) for cap in CAPS for kind in ("all weights", "LoRA")
    ]
    assert all(0 < row["estimate_gib"] < row["cap_gib"] and row["tokens"] == 256 for row in parts["memory"])
    assert parts["update"].keys() == {"shared_memory", "filesystem", "process_group"}
    assert all(each["pause_steps"] >= 0 and each["tokens_lost"] == 0 for each in parts["update"].values())
    engines = {f"{kind}, {num} requests" for kind in ("native", "transformers") for num in (64, 256)}
    assert parts["engine"]["rows"].keys() == engines
    assert parts["trainer"]["rows"].keys() == {"trainer, groups", "trainer, 16k", "trainer, 65k"}
    assert parts["peer"]["serial"]["step_s"] > 0 and {"trl", "why_no_trl"} & parts["peer"].keys()
    assert parts["checks"]["passed"] == ["micro-batches"]


def test_a_part_that_reaches_its_limit_or_fails_loses_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], timeout: float, env: dict[str, str]) -> Any:
        name = Path(command[command.index("--json") + 1])
        name.write_text(json.dumps({"half": 1}))
        if name.stem == "slow":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode={"bad": 3}.get(name.stem, 0))

    monkeypatch.setattr(one_gpu, "PARTS", {name: Part("x.py", (), 1) for name in ("slow", "bad", "good")})
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="1"):
        measure_all("cpu", True, tmp_path / "found.json", "")
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert {name: each["exit"] for name, each in parts.items()} == {
        "slow": "stopped at its time limit",
        "bad": "3",
        "good": "0",
    }
    assert all(each["results"] == {"half": 1} for each in parts.values())


def test_the_parts_take_ten_minutes_at_most_and_a_cpu_is_for_little_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum(each.limit_s for each in PARTS.values()) <= 600
    with pytest.raises(SystemExit, match="--device cpu needs --tiny"):
        main(device="cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device; with --device cpu --tiny"):
        main()
