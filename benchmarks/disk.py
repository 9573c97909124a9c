"""How much disk do the checkpoints of a run take, and can a run that is killed while they move be resumed?

    python benchmarks/disk.py --model examples/smollm2/model [--kills 12] [--seed 0] [--json F]

Size: a run of two rounds with a checkpoint after each. The folder is measured every 20 ms, a file with
several names once. `predicted` is what `tailrace.drivers.assembly.disk` says before the start.

Kills: a run is killed with SIGKILL, controller and workers at once, at a random moment between the appearance
of a new checkpoint and the end of the removal of the optimizer's state from the one before, and resumed.

    resumed      lives that went on from the newest checkpoint, to the next one
    before, amid, after   kills before the state was given up, while its files went, and after that
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import run, write
from crash import kill
from tailrace.config import LiveConfig, load_config
from tailrace.contracts.trainer import is_checkpoint
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.drivers.assembly.disk import disk_need
from tailrace.drivers.trainer.checksums import STATE_FOLDER, is_retired

CONFIG = """
run = {{ rounds = 2, group_size = 2, checkpoint_every = 1 }}
schedule = {{ name = "serial", groups_per_round = 1, groups_per_step = 1 }}
model = {{ path = "{model}" }}
data = {{ kind = "rows", path = "rows.jsonl" }}
reward = {{ function = "rewards.py:length" }}
sampling = {{ max_completion_tokens = 8 }}
engine = {{ threads = 1 }}
trainer = {{ threads = 1, learning_rate = 1e-6 }}
"""
REWARDS = "def length(completion):\n    return float(len(completion) % 7)\n"
PERIOD_S, PATIENCE_S = 0.02, 600.0
ENDLESS = 1000


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(OSError):
            state = path.lstat()
            found[state.st_ino] = state.st_size
    return sum(found.values())


def start(folder: Path, rounds: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tailrace.cli", "train", str(folder / "run.toml"), "--resume"]
    words += ["--output-dir", str(folder / "out"), "--run.rounds", str(rounds)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(words, start_new_session=True, stdout=log, stderr=log)


def wait(process: subprocess.Popen[bytes], folder: Path, condition: Callable[[], bool]) -> None:
    """Wait for a condition. Exits with the output of the run if it ends or hangs before."""
    began_s = time.monotonic()
    while not condition():
        if process.poll() is not None or time.monotonic() - began_s > PATIENCE_S:
            kill(process)
            raise SystemExit((folder / "log").read_text(encoding="utf-8")[-4000:])
        time.sleep(PERIOD_S / 4)


def measured(folder: Path) -> dict[str, int]:
    """The size of a run of two rounds."""
    need = disk_need(LiveConfig.of(load_config(folder / "run.toml")))
    process, peak = start(folder, 2), 0
    while process.poll() is None:
        peak = max(peak, size_of(folder / "out"))
        time.sleep(PERIOD_S)
    if process.returncode:
        raise SystemExit((folder / "log").read_text(encoding="utf-8")[-4000:])
    predicted = {"predicted_end": need.end, "predicted_peak": need.peak}
    return {"end": size_of(folder / "out"), "peak": peak, **predicted}


def trained(folder: Path) -> dict[Path, int]:
    """The checkpoints that have an optimizer step, with the time at which the model of each was written."""
    found = {}
    for path in filter(is_checkpoint, (folder / "out" / "checkpoints").glob("round_*")):
        with suppress(OSError):
            if path.name != checkpoint_name(0):
                found[path] = (path / "model.safetensors").stat().st_mtime_ns
    return found


def killed(folder: Path, kills: int, chance: random.Random) -> Counter[str]:
    """Kill a run so often, each time after it has written a checkpoint."""
    found, span_s = Counter[str](resumed=0, before=0, amid=0, after=0), 0.0
    for number in range(kills + 2):
        before, process = trained(folder), start(folder, ENDLESS)

        def written(before: dict[Path, int] = before) -> bool:
            return bool(trained(folder).items() - before.items())

        wait(process, folder, written)
        found["resumed"] += number > 1
        newest, *others = sorted(trained(folder), reverse=True)
        older, began_s = max(others, default=newest.with_name(checkpoint_name(0))), time.monotonic()

        def is_given_up(older: Path = older) -> bool:
            return not (older / STATE_FOLDER).exists()

        if number == 0:
            wait(process, folder, is_given_up)
            span_s = time.monotonic() - began_s
        else:
            time.sleep(chance.uniform(0, 1.2 * span_s))
        kill(process)
        if number in range(1, kills + 1):
            place = "after" if is_given_up() else "amid" if is_retired(older) else "before"
            found[place] += 1
            print(f"kill {number} of {kills}: {place}; checkpoints {newest.name}, {older.name}", flush=True)
    return found


def main(*, model: Path, kills: int = 12, seed: int = 0, json: Path | None = None) -> None:
    """Measure the size, then kill."""
    found: dict[str, Any] = {}
    for what in ("size", "kills") if kills else ("size",):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "run.toml").write_text(CONFIG.format(model=model.resolve()), encoding="utf-8")
            (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
            rows = [f'{{"prompt": "Count to {each}."}}\n' for each in range(256)]
            (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
            found[what] = measured(folder) if what == "size" else killed(folder, kills, random.Random(seed))
        print(what, found[what], flush=True)
    write(json, found)


if __name__ == "__main__":
    run(main)
