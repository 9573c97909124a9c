"""The quickstart's model on a run small enough for a test."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tailrace.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL_RUN = """
[run]
rounds = 3
group_size = 2
eval_every = 3
eval_prompts = 4
checkpoint_every = 1
keep_checkpoints = 0
keep_optimizer = 0

[schedule]
name = "rolloutpipe"
groups_per_round = 4
groups_per_step = 2

[model]
path = "{model}"

[data]
kind = "rows"
path = "{data}"

[reward]
function = "{rewards}:digits"
timeout_s = 2.0

[sampling]
max_completion_tokens = 12

[engine]
dtype = "float32"

[trainer]
dtype = "float32"
threads = 1
learning_rate = 1e-4
"""

REWARDS = '''
import time

def digits(completion):
    """How many digits: a reward that any response gets."""
    return float(sum(letter.isdigit() for letter in completion))

def unreliable(prompt, completion):
    """Each prompt's first figure says what goes wrong."""
    match prompt[0]:
        case "1":
            raise ValueError("no")
        case "2":
            return "one"
        case "3":
            return float("nan")
        case "4":
            time.sleep(60)
    return 1.0
'''


def write_small_run(folder: Path) -> Path:
    """A config beside its data and its rewards."""
    rows = [f'{{"prompt": "{n % 10} + {n % 7} =\\n"}}' for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "run.toml"
    path.write_text(
        SMALL_RUN.format(model=EXAMPLES / "quickstart" / "model", data="rows.jsonl", rewards="rewards.py")
    )
    return path


def start_training(config: Path, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """A process that trains, in a process group of its own. A round has 64 optimizer steps."""
    command = [sys.executable, "-m", "tailrace.cli", "train", str(config), "--output-dir", str(folder)]
    long = ["--run.eval_every", "0", "--run.checkpoint_every", "0", "--schedule.groups_per_round", "128"]
    return subprocess.Popen(
        [*command, *long, *words],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train_here(config: Path, *words: str, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Train in `out` beside the config, in this process, whose fork server has imported torch already.

    Args:
        meanwhile: what a thread does beside the run.

    Returns:
        The exit code.
    """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(meanwhile)
        code = main(["train", str(config), "--output-dir", str(config.parent / "out"), *words])
        done.result(timeout=60)
    return code


def num_steps(folder: Path) -> int:
    """Optimizer steps that the metrics have."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def wait_for_steps(folder: Path, n: int, process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait until a run has made so many optimizer steps.

    Args:
        process: that of the run; None: this one.
    """
    end_s = time.monotonic() + 120
    while num_steps(folder) < n:
        assert time.monotonic() < end_s
        assert process is None or process.poll() is None, process and process.communicate()
        time.sleep(0.01)


def trained_prompts(folder: Path) -> Counter[int]:
    """How many samples of each prompt were trained, by the run's own records."""
    records = [
        json.loads(line)
        for path in sorted((folder / "samples").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return Counter(int(record["id"].split(".")[0]) for record in records)
