"""A simulation needs pydantic, msgspec and pure Python, and starts no process: it also runs in a browser."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from hashlib import sha256
from pathlib import Path

BLOCKED = set(sys.argv[3:])

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder)

from tailrace.config import load_config
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.record.events import Recorder
from tailrace.record.run_log import LogWriter
from tailrace.record.steps import StepMeter

config = load_config(Path(sys.argv[1]), {"schedule.name": sys.argv[2], "run.rounds": "1"})
log = Path("events.jsonl")
recorder = Recorder(StepMeter(LogWriter(log), wall_clock=lambda: 0.0))
print(run_virtual(config, resolve(config), recorder), sha256(log.read_bytes()).hexdigest())
print(sorted({"numpy", "torch", "transformers"} & sys.modules.keys()))
"""
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster.toml"


@pytest.mark.parametrize("schedule", ["serial", "april", "tailrace", "pipelinerl"])
def test_a_run_has_the_same_events_and_seconds_where_numpy_cannot_be_imported(
    schedule: str, tmp_path: Path
) -> None:
    def output(*blocked: str) -> list[str]:
        command = [sys.executable, "-c", RUN, str(CLUSTER), schedule, *blocked]
        (tmp_path / "events.jsonl").unlink(missing_ok=True)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    absent = ("numpy", "torch", "transformers", "safetensors", "resource", "multiprocessing")
    assert output(*absent) == output()
    assert output()[1] == "[]", "they are not imported where they are installed, either"
