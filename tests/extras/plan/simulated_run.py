"""A simulated run with all files of a live one, so that its exact costs are known."""

import json
from pathlib import Path
from typing import Any

from tailrace import clock
from tailrace.config import RunConfig
from tailrace.drivers.assembly.schedule import resolve, with_published_defaults
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.record.events import Recorder
from tailrace.record.metrics import MetricsWriter
from tailrace.record.run_log import LogWriter
from tailrace.record.samples import SamplesWriter
from tailrace.record.steps import StepMeter

SERIAL: dict[str, Any] = {"name": "serial", "groups_per_round": 32, "groups_per_step": 8}
OVERLAPPED: dict[str, Any] = {**SERIAL, "name": "rolloutpipe"}
ENGINES = {
    "count": 2,
    "slots": 32,
    "base_s": 6e-3,
    "slope_s": 0.1e-3,
    "context_s": 0.4e-6,
    "prefill_tokens_per_s": 20_000.0,
    "load_s": 0.7,
}
TRAINER = {"tokens_per_s": 50_000.0, "pass_s": 0.2, "step_s": 0.4, "publish_s": 0.3}
LENGTHS = {"median_tokens": 400.0, "sigma": 0.9, "correlation": 0.6, "max_tokens": 4096, "prompt_tokens": 150}
REWARDS = {"workers": 64, "median_s": 0.2, "sigma": 0.5}
SIM: dict[str, Any] = {"engines": ENGINES, "trainer": TRAINER, "lengths": LENGTHS, "rewards": REWARDS}


def run_config(schedule: dict[str, Any] = SERIAL, **sim: Any) -> RunConfig:
    tree = {"run": {"rounds": 3, "group_size": 8}, "schedule": schedule, "sim": SIM | sim}
    return RunConfig.model_validate(tree)


def write_run(folder: Path, config: RunConfig) -> Path:
    """Simulate a config, and write the files that a live run has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config.toml())
    config = with_published_defaults(config)
    sinks = [
        MetricsWriter(folder / "metrics.jsonl"),
        LogWriter(folder / "events.jsonl"),
        SamplesWriter(folder / "samples"),
    ]
    run_virtual(config, resolve(config), Recorder(StepMeter(*sinks, wall_clock=clock.wall_time)))
    return folder


def main_times(folder: Path) -> list[float]:
    """The main time of each round."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["round/main_time_s"] for row in rows if "round/main_time_s" in row]
