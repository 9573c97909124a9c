"""Runs that are killed, as a whole or engine by engine, and what an audit finds afterwards. For crash.py."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tailrace.engine.base import counted_tokens
from tailrace.errors import LedgerError
from tailrace.ledger.base import Books
from tailrace.ledger.recovery import held_tokens_of, read_books, totals_of
from tailrace.ledger.sqlite import SqliteStore
from tailrace.record.events import Event, RequestEnded, RequestStarted, RoundStarted

EXAMPLES = Path(__file__).parent.parent / "examples"
ENDLESS = 100_000
KEPT_CHECKPOINTS = 3
LIFE_S, START_S = 2.5, 6.0
"""A kill comes within so many seconds after a life began to train; or, one in eight, after it was spawned."""
KILL_S = 0.5
"""An engine is killed within so many seconds after the start of a round."""
ROUNDS_PER_KILL, LAST_ROUNDS = 5, 4
"""No engine is killed in the last rounds."""
PATIENCE_S = 300.0
REQUESTS = "requests.jsonl"


@dataclass(frozen=True)
class Found:
    """What an audit found wrong."""

    tokens_unaccounted: int
    trained_twice: int
    lost: int


class Victim:
    """A run of the quickstart's task that is killed.

    Args:
        schedule: name and parameters.
        options: settings that replace those of the example.
        example: a config in `examples/`.
    """

    def __init__(
        self,
        name: str,
        schedule: Mapping[str, object],
        folder: Path,
        options: Mapping[str, str],
        example: str = "quickstart/quickstart.toml",
    ) -> None:
        self.folder, self._options = folder / name, options
        self.forgotten = 0
        self._drawn: dict[int, int] = {}
        settings = tomllib.loads((EXAMPLES / example).read_text())
        settings["schedule"] = {"name": name, **schedule}
        settings["model"]["path"] = str((EXAMPLES / example).parent / settings["model"]["path"])
        self._config = folder / f"{name}.toml"
        self._config.write_text(tomli_w.dumps(settings))

    def live_and_die(self, chance: random.Random) -> None:
        """One life, killed with all its workers at a random moment."""
        process = self._start(ENDLESS)
        if chance.random() < 1 / 8:
            time.sleep(chance.uniform(0, START_S))
        else:
            before = self._lives_that_drew()
            self._wait(process, lambda: self._lives_that_drew() > before, "it did not come back to life")
            time.sleep(chance.uniform(0, LIFE_S))
        kill(process)
        self._compare()
        for old in sorted((self.folder / "checkpoints").glob("round_??????"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def live_to_the_end(self) -> None:
        """The last life, two rounds long."""
        begun = (self.folder / "ledger.sqlite").exists()  # a kill may have come before
        marks = self.books().marks if begun else []
        self._finish(self._start(2 + max((mark.round for mark in marks if mark.undone is None), default=0)))
        self._compare()

    def lose_engines(self, kills: int, kind: str, chance: random.Random) -> None:
        """One life to its last round, in which random engines are killed at random moments."""
        process = self._start(kills * ROUNDS_PER_KILL + LAST_ROUNDS)
        for number in range(kills):
            round = number * ROUNDS_PER_KILL + chance.randrange(ROUNDS_PER_KILL)
            self._wait(process, lambda round=round: self._round() >= round, f"round {round} did not come")
            time.sleep(chance.uniform(0, KILL_S))
            self._wait(process, lambda: bool(engines_of(process.pid, kind)), "no engine came back")
            with suppress(ProcessLookupError):
                os.kill(chance.choice(engines_of(process.pid, kind)), signal.SIGKILL)
        self._finish(process)

    def live(self, rounds: int) -> None:
        """One life to its last round, in which nothing is killed."""
        self._finish(self._start(rounds))

    def books(self) -> Books:
        with closing(SqliteStore.open(self.folder / "ledger.sqlite", only_read=True)) as store:
            return read_books(store)

    def audit(self) -> Found:
        """Compare the ledger with what it does not write itself."""
        books = self.books()
        known = totals_of(books).num_known_tokens + held_tokens_of(books)
        trained = [str(training.id) for training in books.trainings.values() if training.undone is None]
        recorded = Counter(
            json.loads(line)["id"]
            for path in (self.folder / "samples").glob("*.jsonl")
            for line in path.read_text().splitlines()
        )
        twice = (Counter(trained) - Counter(set(trained))) | (recorded - Counter(set(recorded)))
        lost = set(range(books.run.num_drawn)) ^ set(books.groups)
        unknown = set(recorded) ^ set(trained)
        return Found(
            counted_tokens(self.folder / "counts") - known,
            twice.total(),
            len(lost) + len(unknown) + self.forgotten,
        )

    def requests(self) -> list[dict[str, Any]]:
        """What `requests_sink` wrote of requests."""
        lines = (self.folder / REQUESTS).read_text().splitlines()
        return [event for line in lines if "sample" in (event := json.loads(line))]

    def _start(self, rounds: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tailrace.cli", "train", str(self._config)]
        words += ["--output-dir", str(self.folder), "--run.rounds", str(rounds), "--resume"]
        words += [word for key, value in self._options.items() for word in (f"--{key}", value)]
        self._log = self.folder.with_suffix(".log")
        with self._log.open("wb") as output:
            return subprocess.Popen(words, start_new_session=True, stdout=output, stderr=output)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() != 0:
            raise SystemExit(f"the last life of {self.folder.name} failed: {self._said()}")

    def _wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], problem: str) -> None:
        waited_s = 0.0
        while not condition():
            if process.poll() is not None or waited_s > PATIENCE_S:
                kill(process)
                raise SystemExit(f"{self.folder.name}: {problem}: {self._said()}")
            time.sleep(0.05)
            waited_s += 0.05

    def _round(self) -> int:
        """The round that began last; -1: none."""
        path = self.folder / REQUESTS
        lines = path.read_text().splitlines() if path.exists() else []
        return max((event["round"] for line in lines if "round" in (event := json.loads(line))), default=-1)

    def _lives_that_drew(self) -> int:
        with suppress(LedgerError):
            books = self.books()
            return len(books.lives) if books.run.num_drawn else 0
        return 0

    def _compare(self) -> None:
        """Whatever was there must be there, drawn in the life it was drawn in."""
        with suppress(LedgerError):
            drawn = {prompt: group.life for prompt, group in self.books().groups.items()}
            self.forgotten += sum(drawn.get(prompt) != life for prompt, life in self._drawn.items())
            self._drawn = drawn

    def _said(self) -> str:
        return self._log.read_text()[-4000:]


class RequestsSink:
    """Sink: a line for each round, and for each request as it starts and ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)  # a kill loses no line

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._put(round=event.round)
            case RequestStarted():
                self._put(sample=str(event.sample), tokens=event.num_tokens)
            case RequestEnded():
                self._put(sample=str(event.sample), tokens=event.num_tokens, outcome=event.outcome)

    def close(self) -> None:
        self._file.close()

    def _put(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")


def requests_sink(folder: Path) -> RequestsSink:
    """For `[record] sinks`."""
    return RequestsSink(folder / REQUESTS)


def regenerated_tokens(requests: list[dict[str, Any]]) -> int:
    """Tokens that had arrived and were generated again under the same sample id."""
    known: dict[str, int] = {}
    finished: set[str] = set()
    again = 0
    for request in requests:
        sample, num_tokens = request["sample"], request["tokens"]
        if "outcome" not in request:
            again += known.get(sample, num_tokens) - (0 if sample in finished else num_tokens)
            continue
        known[sample] = num_tokens
        if request["outcome"] in ("stop", "length"):
            finished.add(sample)
    return again


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the controller and every worker, each of which leads a group."""
    for leader in [process.pid, *children_of(process.pid)]:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    process.wait()


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def engines_of(pid: int, kind: str) -> list[int]:
    """The engines that a controller has at present, those that start included."""
    if kind == "native":
        return [engine for server in running(pid, "fork_server") for engine in forked(server, "engine")]
    return [server for parent in running(pid, "server_child") for server in children_of(parent)]


def running(pid: int, module: str) -> list[int]:
    """The children of a controller that run a module of `tailrace.workers`."""
    found = []
    for child in children_of(pid):
        with suppress(FileNotFoundError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()  # empty: a zombie
            if f"tailrace.workers.{module}".encode() in command:
                found.append(child)
    return found


def forked(server: int, kind: str) -> list[int]:
    """The workers of a fork server whose names begin with their kind."""
    found = []
    for child in children_of(server):
        with suppress(FileNotFoundError):
            is_alive = bool(Path(f"/proc/{child}/cmdline").read_bytes())  # as above
            if is_alive and Path(f"/proc/{child}/comm").read_text().startswith(kind):
                found.append(child)
    return found
