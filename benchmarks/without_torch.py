"""An installation without extras: commands that need no model work, others say in a line what to install.

    python benchmarks/without_torch.py FOLDER [RUN]

`python` is that of an installation of the package without torch; `make release-check` makes a fresh one.
Files go into FOLDER. With the output directory of a trained RUN the commands that read one are called, too.
Each command is called in this process. It prints a line of JSON for each: the words, the exit code, and the
last line of standard error. The exit code is 1 if one is another than expected, or torch was imported.
"""

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import tailrace
from tailrace.cli import main
from tailrace.importing import TRAINING, install

MODEL = Path(tailrace.__file__).parent / "extras" / "quickstart" / "model"
VIRTUAL = """
run = { rounds = 2, group_size = 8 }
schedule = { name = "serial", groups_per_round = 2, groups_per_step = 2 }
compare = { schedules = ["serial", "rolloutpipe"], repeats = 1 }
plan = { steps = 16, top = 1 }
weights = { transport = "process_group" }
sim.cluster = { device = "H100", devices = 2, model = "Qwen2.5-1.5B", rollout_devices = 1 }
sim.lengths.max_tokens = 64
"""
LIVE = """
run = { rounds = 1, group_size = 2 }
schedule = { name = "serial", groups_per_round = 2, groups_per_step = 2 }
model.path = "model"
data = { kind = "rows", path = "rows.jsonl" }
reward.function = "exact_match"
"""
STEP = {
    **{
        "timing_s/step": 80.0,
        "timing_s/gen": 30.0,
        "timing_s/update_actor": 40.0,
        "timing_s/old_log_prob": 5.0,
    },
    **{"response_length/mean": 600.0, "response_length/max": 2000.0, "response_length/clip_ratio": 0.0},
    **{"prompt_length/mean": 100.0, "perf/total_num_tokens": 11_200.0},
}
"""A step of verl."""
WORKS: Sequence[str] = (
    "--version",
    "--help",
    "playground --help",  # it serves until a signal comes
    "simulate virtual.toml --output-dir simulated --json summary.json",
    "simulate virtual.toml --output-dir other --sim.cluster.model {model} --schedule.name rolloutpipe",
    "compare simulated other",
    "compare virtual.toml --virtual",
    "view simulated --output page.html",
    "view simulated --perfetto trace.json",
    "plan virtual.toml",
    "fit verl.jsonl --samples 16 --output fitted.toml",
    "simulate virtual.toml --like verl.jsonl",
    "plan virtual.toml --from verl.jsonl",
    "advise verl.jsonl --samples 16",
    "init --model Qwen/Qwen2.5-1.5B --data rows.jsonl --gpus 2xH100 --folder begun",
)
WORKS_ON_A_RUN: Sequence[str] = (
    "inspect {run}",
    "inspect {run} --group 0",
    "fit {run}",
    "simulate virtual.toml --like {run}",
    "view {run} --output run.html",
)
REFUSED = {
    "quickstart": "quickstart",
    "init --model someone/new --data rows.jsonl": "train",
    "train live.toml --output-dir out": "train",
    "train live.toml --output-dir out --dry-run": "train",
    "sft live.toml --output-dir out": "train",
    "compare live.toml": "train",
    "check-reward live.toml": "train",
    "diagnose live.toml": "train",
    "eval live.toml": "train",
    "fit live.toml --profile profile.json": "train",
    "join engine 127.0.0.1:1": "train",
    "push simulated someone/it": "train",
    "serve someone/new": "serve",
    "serve someone/new --tinker": "tinker",
    "view simulated": "view",
}
"""What is refused, and the extra that the message says to install."""


def called(words: str) -> tuple[int, str]:
    """Call a command, and return its exit code and the last line of standard error."""
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        try:
            code = main(words.split())
        except SystemExit as why:
            code = int(why.code or 0)
        except BaseException:
            traceback.print_exc()
            code = -1
    lines = err.getvalue().strip().splitlines()
    return code, lines[-1] if lines else ""


def trained() -> str:
    """Return the error of `tailrace.train`."""
    try:
        tailrace.train(tailrace.load_config("live.toml"), "out")
    except tailrace.ConfigError as why:
        return str(why)
    return "it trained"


def checks(run: Path | None) -> Iterator[bool]:
    """Call everything in the working directory; whether each did as it should."""

    def said(words: str, code: int, last: str, is_right: bool) -> bool:
        print(json.dumps([words, code, last]), flush=True)
        return is_right

    for template in (*WORKS, *(WORKS_ON_A_RUN if run else ())):
        code, last = called(words := template.format(run=run, model=MODEL))
        yield said(words, code, last, code == 0)
    for words, extra in REFUSED.items():
        code, last = called(words)
        yield said(words, code, last, code == 2 and last.endswith(f"; {install(extra)}"))
    yield said("tailrace.train", 0, last := trained(), last.endswith(f"; {install('train')}"))
    names = sorted({*TRAINING, "scipy"} & sys.modules.keys())
    yield said("imported", 0, ", ".join(names), not names and find_spec("torch") is None)
    there = {each.name for each in Path().iterdir()}
    yield said("written", 0, ", ".join(sorted(there & {"out", "runs"})), not there & {"out", "runs"})


if __name__ == "__main__":
    folder, *given = sys.argv[1:]
    run = Path(given[0]).resolve() if given else None
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    row = {"prompt": "1 + 1 =", "answer": "2"}
    Path("virtual.toml").write_text(VIRTUAL, encoding="utf-8")
    Path("live.toml").write_text(LIVE, encoding="utf-8")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    steps = "".join(json.dumps({"step": n, "data": STEP}) + "\n" for n in range(1, 9))
    Path("verl.jsonl").write_text(steps, encoding="utf-8")
    sys.exit(not all([*checks(run)]))
