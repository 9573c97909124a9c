"""Is damage to a file of a run folder noticed, or does a command go on with other content?

    python benchmarks/corrupt.py [--flips N] [--truncations N] [--seed N] [--kinds A,B] [--json F]

A small live run is made. Each case damages one file of a copy: it flips a bit or cuts off the end. On copies
of that run the commands that read its kind (READERS): `train --resume` for one more round, `eval`, `eval
--model M` with the run's own model/, `inspect` and `view`. File kinds take turns. Logs and the lock
are left alone: no command reads them.

    detected    a command ends with exit code 1 or 2, without a traceback, and its message names the file; or
                a warning names it
    harmless    the commands give what they give on the undamaged run
    accepted    a command ends with 0 and another result
    unnamed     a command ends with 1 or 2 and its message does not name the file
    traceback   a command prints a traceback, or ends with another exit code
    hang        a command does not end in time

The worst outcome of the commands counts. The results compared are the exported weights, the accuracy and the
balance. Of `view` only the exit code is judged: a changed number in a record that it shows is not noticed.
The small files of model/ may be edited by users: a change gives a warning.
The exported weights are compared only if two undamaged resumptions agree in them bit for bit.
"""

import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from common import QUICKSTART, run, write

OPTIONS = {
    "run.group_size": "4",
    "run.eval_every": "0",
    "run.eval_prompts": "8",
    "run.eval_greedy": "true",
    "run.checkpoint_every": "1",
    "schedule.name": "serial",
    "schedule.groups_per_round": "4",
    "schedule.groups_per_step": "4",
    "sampling.max_completion_tokens": "32",
}
ROUNDS = 2
TIMEOUT_S = 300
ORDER = ("harmless", "detected", "unnamed", "accepted", "hang", "traceback")
"""Outcomes, the worst last."""
BAD = ("unnamed", "accepted", "hang", "traceback")


READERS = {
    "checkpoints": ("resume", "eval"),
    "checkpoints/trainer": ("resume", "eval"),
    "model": ("eval model",),
    "ledger.sqlite": ("resume", "inspect"),
    "counts": ("resume", "inspect"),
    "config.toml": ("eval", "inspect", "view"),
    "metrics.jsonl": ("resume", "view"),
    "samples": ("resume", "view"),
    "summary.json": ("resume", "view"),
    "events.jsonl": ("resume", "view"),
}
"""The commands that read a kind of file."""


SERVER = """
import json, os, sys, traceback
from tailrace.cli import main
replies = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    words, said = json.loads(line)
    file = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(code, file=replies, flush=True)
"""


class Commands:
    """Executes commands one after another in one process, which has imported everything and keeps the server
    from which workers are forked. Each command reads the files anew."""

    def __init__(self, scratch: Path) -> None:
        self._said = scratch / "said"
        self._server: subprocess.Popen[bytes] | None = None

    def __call__(self, *words: str) -> tuple[int | None, str]:
        """Exit code, None after the time limit, and all that was printed."""
        if self._server is None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "10000"}
            command = [sys.executable, "-c", SERVER]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        server = self._server
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps([words, str(self._said)]).encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], TIMEOUT_S)[0]:
            self.close()
            return None, ""
        code = server.stdout.readline().strip()
        if not code:  # the process has ended
            self.close()
        return int(code or server.wait()), self._said.read_text(errors="replace", encoding="utf-8")

    def close(self) -> None:
        """End the process. The kernel ends the processes that it has started."""
        if self._server:
            self._server.kill()
            self._server.communicate()
        self._server = None


def train(tailrace: Commands, folder: Path, rounds: int) -> tuple[int | None, str]:
    options = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    where = ("--output-dir", str(folder), "--resume")
    return tailrace("train", str(QUICKSTART), *where, "--run.rounds", str(rounds), *options)


def results(
    tailrace: Commands, run: Path, scratch: Path, names: Sequence[str]
) -> dict[str, tuple[int | None, str, object]]:
    """Exit code, output and result of commands, on copies of a run in the same place."""
    found: dict[str, tuple[int | None, str, object]] = {}
    there, answer = scratch / "run", scratch / "answer"
    for name in names:
        shutil.rmtree(there, ignore_errors=True)
        answer.unlink(missing_ok=True)
        shutil.copytree(run, there)
        result: object = None
        if name == "resume":
            code, said = train(tailrace, there, ROUNDS + 1)
            if code == 0:
                result = [path.read_bytes() for path in sorted(there.glob("model/*.safetensors"))]
        elif name.startswith("eval"):
            model = ("--model", str(there / "model")) if name == "eval model" else ()
            code, said = tailrace("eval", str(there), *model, "--json", str(answer))
            result = json.loads(answer.read_text(encoding="utf-8")) if code == 0 else None
        elif name == "inspect":
            code, said = tailrace("inspect", str(there), "--json")
            result = said if code == 0 else None
        else:
            code, said = tailrace("view", str(there), "--output", str(answer))
        found[name] = code, said, result
    return found


def kind_of(path: Path) -> str:
    """The first folder of a path in the run, or the file's name; parts of a checkpoint apart."""
    if path.parts[0] == "checkpoints":
        return "checkpoints/trainer" if "trainer" in path.parts else "checkpoints"
    return path.parts[0]


def damage(file: Path, how: str, chance: random.Random) -> str:
    """Flip a bit of a file or cut off its end; what was done."""
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if how == "flip":
        bit = chance.randrange(8)
        content[at] ^= 1 << bit
        done = f"bit {bit} of byte {at}"
    else:
        del content[at:]
        done = f"cut to {at} bytes"
    file.unlink()  # it may be a hard link
    file.write_bytes(content)
    return done


def outcome(name: str, got: tuple[int | None, str, object], expected: tuple[int | None, str, object]) -> str:
    """The class of one command's end.

    Args:
        name: of the damaged file.
    """
    code, said, result = got
    if code is None:
        return "hang"
    if code not in (0, 1, 2) or "Traceback (most recent call last)" in said:
        return "traceback"
    is_named = name in said.replace("\n", "")
    if code:
        return "detected" if is_named else "unnamed"
    if result == expected[2]:
        return "harmless"
    return "detected" if is_named and "warning: " in said else "accepted"


def corrupt(flips: int, truncations: int, seed: int, kinds: set[str]) -> Iterator[dict[str, str]]:
    """Make the run and damage copies of it; one object for each case.

    Args:
        kinds: of the files that are damaged; empty: all.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as at, closing(Commands(Path(at))) as tailrace:
        scratch = Path(at)
        run, copy = scratch / "original", scratch / "damaged"
        code, said = train(tailrace, run, ROUNDS)
        if code != 0:
            raise SystemExit(f"the run failed:\n{said}")
        every = sorted({name for names in READERS.values() for name in names})
        expected, again = (results(tailrace, run, scratch, every) for _ in range(2))
        if failed := [name for name, (code, _, _) in expected.items() if code]:
            raise SystemExit(f"commands fail on the undamaged run: {failed}")
        unequal = {name for name in expected if expected[name][2] != again[name][2]}
        print(f"results that are not reproducible, so not compared: {sorted(unequal) or 'none'}", flush=True)
        files = defaultdict(list)
        for path in sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size):
            files[kind_of(path.relative_to(run))].append(path.relative_to(run))
        names = sorted(set(files) & set(READERS) & (kinds or set(READERS)))
        for number, how in enumerate(["flip"] * flips + ["truncation"] * truncations):
            kind = names[number % len(names)]
            file = chance.choice(files[kind])
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy)
            done = damage(copy / file, how, chance)
            ends = {}
            for name, got in results(tailrace, copy, scratch, READERS[kind]).items():
                compared = got if name in unequal else expected[name]
                ends[name] = outcome(file.name, got, compared)
            worst = max(ends.values(), key=ORDER.index)
            if worst in BAD:
                print(f"{file}, {done}: {ends}", flush=True)
            yield {"kind": kind, "how": how, "file": str(file), "done": done, "outcome": worst, **ends}


def main(
    flips: int = 300, truncations: int = 100, seed: int = 0, kinds: str = "", json: Path | None = None
) -> None:
    cases = []
    for case in corrupt(flips, truncations, seed, set(filter(None, kinds.split(",")))):
        cases.append(case)
        write(json, cases)  # of a run that is stopped, too
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        table[case["kind"]][case["outcome"]] += 1
    print(f"{'':24}" + "".join(f"{each:>11}" for each in ORDER))
    for kind, counts in sorted(table.items()):
        print(f"{kind:24}" + "".join(f"{counts[each]:11}" for each in ORDER))
    write(json, cases)
    raise SystemExit(any(case["outcome"] in BAD for case in cases))


if __name__ == "__main__":
    run(main)
