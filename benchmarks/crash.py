"""Is anything lost when a run or an engine is killed, and what does it cost to lose nothing?

    python benchmarks/crash.py [--kill all|engines|trainer] [--engine native|vllm] [--kills N] [--colocated]
                               [--task sums|tools|papers|pinned|real|service|verified] [--parallel N]
                               [--repeats N] [--seed N] [--json F]
    python benchmarks/crash.py --freeze N [--task service] [--seed N] [--json F]

--kill all: live runs of the quickstart's model, of april and of rolloutpipe, are killed with SIGKILL,
controller and workers at once, at random moments of their start and of their training, and resumed each time;
in the end each runs to its last round, where `Run.finish` compares the ledger with the engines' own counts.
--colocated: engines and trainer take turns, and the trainer's state goes to the disk and back in each round.

--kill engines: live runs of april, pipelinerl and tailrace, on three native engines or two vLLM servers, lose
one engine after another to SIGKILL at random moments, also one that is being restarted. Each run must end by
itself after its last round. With --task pinned it is the runs of that task.

--kill trainer: live runs of the schedules of --task pinned lose their trainer to SIGKILL at random moments,
alone or together with an engine. It starts again (`trainer.restarts`), and each run must end by itself.
--parallel: the trainer's processes, which divide its layers; one of them is killed.

--task tools: instead, a run of april on the example with tools is killed with SIGKILL, also while tools work.
--task papers: instead, the examples of APRIL, PipelineRL and RollPacker as they stand are killed and resumed.
--task service: instead, a run of april on `tailrace serve --tinker` is killed, or the service is, which
starts again; the run then ends by itself, and is resumed. Needs `pip install tailrace[tinker]`.
--task pinned: instead, trl_async, dora and laminar on two engines that serve the last versions as adapters of
LoRA; each sample has one version.
--task verified: instead, tailrace, pipelinerl and april with stale = "verify" and bounds of 0 and 1,
and april on the example with tools.
--task real: instead, april and pipelinerl on SmolLM2-135M and sums with a long tail of lengths.

--freeze N: instead, N random pairs of faults in live runs of seven schedules with two engines, and, where
Tinker's SDK is installed, in a run on a service (--task service: there alone). One process is stopped by
SIGSTOP, and after a random time another one gets SIGKILL or SIGTERM: the controller, the fork server, an
engine, the trainer, each process of a scorer, those of the service. The run must end within the health limit
and 30 s, with a process named, or go on; then it is resumed.

    hangs                cases that neither ended nor went on in time
    unnamed              cases that ended without the name of a process, or with a traceback
    left_behind          processes that were still there 10 s after the end of their run
    ended, went_on       all other cases

Then a run is audited by what its ledger does not write itself: the engines' counts, samples/, which says what
was trained, and a sink that writes every request down.

    tokens_unaccounted   the engines' counts, all lives together, less trained, held, wasted and evaluated
    trained_twice        samples that the surviving lineage of checkpoints contains twice
    lost                 prompts drawn, or samples trained, that the ledger does not know of or forgot
    other_version        (pinned) tokens of a version other than that with which their sample began
    groups_not_of_k      (pinned) trained groups of more or fewer samples than the group size
    not_arrived          (trainer) answers of engines that are not those of the publication they had loaded
    not_published        (trainer) versions that an engine served and that were never published
    regenerated          tokens that had arrived and were generated again for the same sample
    turns_regenerated    (tools) turns that the ledger had as ended, and that were generated again
    calls_repeated       (tools) calls whose answer the ledger had, and that were made again
    calls_lost           (tools) calls that returned just before a kill, whose answer no episode had used, and
                         that were made again

The cost (--kill all): the same rounds of the race with the ledger in SQLite and without one, in turn, on the
same workers.
"""

import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import tomli_w

from common import EXAMPLES, run, tree, write
from tailrace import clock
from tailrace.config import RunConfig, load_config
from tailrace.contracts.engine import counted_tokens
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.trials import BoundRun, SharedWorkers
from tailrace.drivers.environments.tools import CALLER
from tailrace.errors import LedgerError
from tailrace.ledger.base import LedgerTables, distance
from tailrace.ledger.journal import Journal, commits_on_thread
from tailrace.ledger.ledger import NullJournal
from tailrace.ledger.recovery import first_life, totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import (
    Event,
    Published,
    Recorder,
    RequestEnded,
    RequestStarted,
    RoundStarted,
    WeightsProbed,
)
from tailrace.record.figures import over_rounds
from tailrace.record.run_log import LogReader
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary

KILLED: dict[str, dict[str, object]] = {
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "rolloutpipe": {"groups_per_round": 8, "groups_per_step": 4},
}
"""Schedules whose runs are killed."""
PINNED: dict[str, dict[str, object]] = {
    name: {"groups_per_step": 8, "groups_in_flight": 24, "staleness": 2}
    for name in ("trl_async", "dora", "laminar")
}
"""Schedules of two engines that are killed, or whose runs are."""
ADAPTERS = {"engine.replicas": "2"}
ADAPTERS |= {f"trainer.lora.{key}": value for key, value in (("rank", "8"), ("publish", "adapter"))}
ADAPTERS |= {"trainer.lora.versions": "3", "trainer.learning_rate": "4e-3"}
VERIFIED: dict[str, dict[str, object]] = {
    "tailrace": {"groups_per_step": 8, "groups_in_flight": 24, "staleness": 0, "stale": "verify"},
    "pipelinerl": {"groups_per_step": 8, "in_flight_per_engine": 96, "ring_groups": 16}
    | {"staleness": 1, "stale": "verify"},
    "april": {"groups_per_round": 8, "groups_launched": 16, "staleness": 0, "stale": "verify"},
    "bubblespec": {"groups_per_round": 8, "groups_per_step": 8},
}
"""Schedules that verify tokens, whose runs are killed."""
REAL: dict[str, dict[str, object]] = {
    "april": {"groups_per_round": 8, "groups_launched": 12},
    "pipelinerl": {"groups_per_step": 8, "in_flight_per_engine": 96, "ring_groups": 16, "ring_full": "block"},
}
"""Schedules whose runs of a real model are killed."""
LOSING: dict[str, dict[str, object]] = {
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "pipelinerl": {"groups_per_step": 8, "in_flight_per_engine": 48, "ring_groups": 16, "ring_full": "block"},
    "tailrace": {"groups_per_step": 8, "groups_in_flight": 16, "staleness": 2},
}
"""Schedules that lose engines."""
ENGINES: Sequence[Sequence[str]] = [["engine"]]
TRAINERS: Sequence[Sequence[str]] = [["trainer"], ["trainer", "engine"]]
"""Roles of the processes that are killed at once, one time after another."""
PAPERS = ("april_dapo", "pipelinerl", "rollpacker")
"""Examples that are killed as they stand."""
ROUNDS_TO_LEARN = 16
"""Before the first kill: then most episodes call the tool."""
OPTIONS = {"run.checkpoint_every": "2", "run.eval_every": "5", "run.eval_prompts": "32"}
EXAMPLE = {"native": "quickstart/quickstart.toml", "vllm": "vllm.toml"}
REPLICAS = {"native": 3, "vllm": 2}
WITH_REQUESTS = {"record.sinks": json.dumps([f"{__file__}:requests_sink"])}
"""Writes every request down."""
ASLEEP = {f"trainer.offload.{part}": "disk" for part in ("weights", "gradients", "optimizer")}
"""The trainer gives all memory of its state back while engines generate on its devices."""
ENDLESS = 100_000
KEPT_CHECKPOINTS = 3
LIFE_S, REAL_LIFE_S, START_S = 2.5, 25.0, 6.0
"""A kill comes within so many seconds after a life began to train; or, one in eight, after it was spawned."""
PATHS = (("model", "path"), ("data", "path"), ("reward", "function"))
"""Settings that are relative to the example."""
KILL_S = 0.5
"""An engine is killed within so many seconds after the start of a round."""
ROUNDS_PER_KILL, LAST_ROUNDS = 5, 4
"""No engine is killed in the last rounds."""
PATIENCE_S = 300.0
HEALTH_S, GRACE_S, VANISH_S = 4.0, 30.0, 10.0
"""Of the runs whose processes are frozen: the limits of their health, and the time beyond it in which a case
must be over; and in which the processes of a run that has ended are gone."""
PAIRS = 4
"""Of faults in one life, at most: an engine that died often pauses long."""
FROZEN: dict[str, dict[str, object]] = (
    KILLED
    | PINNED
    | {
        name: {"groups_per_step": 8, **more}
        for name, more in (
            ("pipelinerl", {"in_flight_per_engine": 48, "ring_groups": 16, "ring_full": "block"}),
            ("tailrace", {"groups_in_flight": 16, "staleness": 2}),
        )
    }
)
"""Schedules whose processes are frozen."""
HEALTHY = {f"{key}timeout_s": str(HEALTH_S) for key in ("host.health_", "engine.health_", "reward.")}
NAMED = re.compile(r"tailrace: .*(trainer|engine-\d|scorer-\d|fork server|the service|SIGTERM)")
REQUESTS = "requests.jsonl"


class Found(NamedTuple):
    """What an audit found wrong."""

    tokens_unaccounted: int
    trained_twice: int
    lost: int


class Victim:
    """A run of the quickstart's task that is killed.

    Args:
        schedule: its parameters; None: the example runs as it stands.
        options: settings that replace those of the example.
        example: a config in `examples/`.
    """

    def __init__(
        self,
        name: str,
        schedule: Mapping[str, object] | None,
        folder: Path,
        options: Mapping[str, str],
        example: str = "quickstart/quickstart.toml",
    ) -> None:
        self.folder, self._options = folder / name, options
        self.forgotten = 0
        self._drawn: dict[int, int] = {}
        self._config = EXAMPLES / example
        if schedule is None:
            return
        settings = tomllib.loads(self._config.read_text(encoding="utf-8"))
        settings["schedule"] = {"name": name, **schedule}
        for table, key in PATHS:
            if key in settings.get(table, {}):
                settings[table][key] = str(self._config.parent / settings[table][key])
        self._config = folder / f"{name}.toml"
        self._config.write_text(tomli_w.dumps(settings), encoding="utf-8")

    def live_and_die(self, chance: random.Random, life_s: float = LIFE_S) -> None:
        """One life, killed with all its workers at a random moment.

        Args:
            life_s: longest time between its first prompt and the kill.
        """
        process = self._start(ENDLESS)
        if chance.random() < 1 / 8:
            time.sleep(chance.uniform(0, START_S))
        else:
            before = self._lives_that_drew()
            self._wait(process, lambda: self._lives_that_drew() > before, "it did not come back to life")
            time.sleep(chance.uniform(0, life_s))
        kill(process)
        self._compare()
        for old in sorted((self.folder / "checkpoints").glob("round_??????"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def live_to_the_end(self) -> None:
        """The last life, two rounds long."""
        begun = (self.folder / "ledger.sqlite").exists()  # a kill may have come before
        rows = self.books().checkpoints if begun else []
        self._finish(self._start(2 + max((row.round for row in rows if row.undone is None), default=0)))
        self._compare()

    def lose(self, kills: int, kind: str, chance: random.Random, roles: Sequence[Sequence[str]]) -> None:
        """One life to its last round, in which random processes are killed at random moments: one of each of
        these roles at once, and the next time those of the next roles."""
        process = self._start(kills * ROUNDS_PER_KILL + LAST_ROUNDS)
        for number in range(kills):
            round = number * ROUNDS_PER_KILL + chance.randrange(ROUNDS_PER_KILL)

            def has_come(round: int = round) -> bool:
                return self._round() >= round

            self._wait(process, has_come, f"round {round} did not come")
            time.sleep(chance.uniform(0, KILL_S))
            found = list[list[int]]()

            def all_there(number: int = number, found: list[list[int]] = found) -> bool:
                named = roles[number % len(roles)]
                found[:] = [workers_of(process.pid, role, kind) for role in named]
                return all(found)

            self._wait(process, all_there, "a process did not come back")
            for each in found:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(each), signal.SIGKILL)
        self._finish(process)

    def live(self, rounds: int) -> None:
        """One life to its last round, in which nothing is killed."""
        self._finish(self._start(rounds))

    def books(self) -> LedgerTables:
        with closing(Store.open(self.folder / "ledger.sqlite", only_read=True)) as store:
            return read_ledger(store)

    def audit(self) -> Found:
        """Compare the ledger with what it does not write itself."""
        books = self.books()
        known = totals_of(books).num_known_tokens + books.held_tokens + books.drafted_tokens
        trained = [str(training.id) for training in books.trainings.values() if training.undone is None]
        recorded = Counter(
            json.loads(line)["id"]
            for path in (self.folder / "samples").glob("*.jsonl")
            for line in path.read_text(encoding="utf-8").splitlines()
        )
        twice = (Counter(trained) - Counter(set(trained))) | (recorded - Counter(set(recorded)))
        lost = set(range(books.run.num_drawn)) ^ set(books.groups)
        unknown = set(recorded) ^ set(trained)
        return Found(
            abs(counted_tokens(self.folder / "counts") - known),
            sum(twice.values()),
            len(lost) + len(unknown) + self.forgotten,
        )

    def requests(self) -> list[dict[str, Any]]:
        """What `requests_sink` wrote of requests."""
        lines = (self.folder / REQUESTS).read_text(encoding="utf-8").splitlines()
        return [event for line in lines if "sample" in (event := json.loads(line))]

    def _start(self, rounds: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tailrace.cli", "train", str(self._config)]
        words += ["--output-dir", str(self.folder), "--run.rounds", str(rounds), "--resume"]
        words += [word for key, value in self._options.items() for word in (f"--{key}", value)]
        self.log = self.folder.with_suffix(".log")
        with self.log.open("wb") as output:
            return subprocess.Popen(words, start_new_session=True, stdout=output, stderr=output)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() != 0:
            raise SystemExit(
                f"the last life of {self.folder.name} failed: {self.log.read_text(encoding='utf-8')[-4000:]}"
            )

    def _wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], problem: str) -> None:
        waited_s = 0.0
        while not condition():
            if process.poll() is not None or waited_s > PATIENCE_S:
                kill(process)
                raise SystemExit(
                    f"{self.folder.name}: {problem}: {self.log.read_text(encoding='utf-8')[-4000:]}"
                )
            time.sleep(0.05)
            waited_s += 0.05

    def _round(self) -> int:
        """The round that began last; -1: none."""
        path = self.folder / REQUESTS
        lines = (
            path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        )  # the run may be writing the last
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


class FrozenVictim(Victim):
    """A run of which one process is stopped, and another one killed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.found = Counter[str](hangs=0, unnamed=0, left_behind=0, ended=0, went_on=0)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_pairs = 0
        """In the present life."""

    def freeze(self, chance: random.Random) -> str:
        """A pair of faults, in a new life if the last one has ended. Returns in words what followed."""
        process = self._alive()
        time.sleep(chance.uniform(0, LIFE_S))
        leader, roles = process.pid, self._roles(process.pid)
        frozen = chosen(roles, chance, spared={leader})
        killed, number = (
            chosen(roles, chance, spared={frozen}),
            chance.choice((signal.SIGKILL, signal.SIGTERM)),
        )
        gap_s = chance.uniform(0, 1.5 * HEALTH_S)
        for pid, each, pause_s in ((frozen, signal.SIGSTOP, gap_s), (killed, number, 0.0)):
            with suppress(ProcessLookupError):
                os.kill(pid, each)
            time.sleep(pause_s)
        outcome = self._outcome(process, frozen)
        self.found[outcome] += 1
        words = f"SIGSTOP {roles[frozen]}, {gap_s:.1f} s, {number.name} {roles[killed]}: {outcome}"
        if outcome == "went_on":
            with suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        else:
            words += f" {self._last_words()}{self._end(roles)}"
        return f"{self.folder.name}: {words}"

    def live_to_the_end(self) -> None:
        if self._process is not None:
            self._end(self._roles(self._process.pid))
        super().live_to_the_end()

    def _alive(self) -> subprocess.Popen[bytes]:
        """A process of the run that trains."""
        if self._process is not None and self._num_pairs == PAIRS:
            self._end(self._roles(self._process.pid))
        if self._process is None:
            before, self._num_pairs = self._lives_that_drew(), 0
            self._process = self._start(ENDLESS)
            problem = "it did not come back to life"
            self._wait(self._process, lambda: self._lives_that_drew() > before, problem)
        self._num_pairs += 1
        return self._process

    def _end(self, roles: Mapping[int, str]) -> str:
        """End a life. Returns in words what it has left behind."""
        assert self._process is not None
        kill(self._process)
        self._process, waited_s = None, 0.0
        while (left := [pid for pid in roles if self._is_left(pid)]) and waited_s < VANISH_S:
            time.sleep(0.1)
            waited_s += 0.1
        self.found["left_behind"] += len(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._compare()
        return f"; left behind: {', '.join(roles[pid] for pid in left)}" if left else ""

    def _outcome(self, process: subprocess.Popen[bytes], frozen: int) -> str:
        """What follows within the time that it may take."""
        began_s, gone_on_from = time.monotonic(), 0
        while (waited_s := time.monotonic() - began_s) < HEALTH_S + GRACE_S:
            if process.poll() is not None:
                words = self.log.read_text(encoding="utf-8")
                is_killed = process.returncode == -signal.SIGKILL
                is_named = NAMED.search(words) and "Traceback" not in words
                return "ended" if is_killed or is_named else "unnamed"
            if waited_s > HEALTH_S + 2 or state_of(frozen) != "T":
                gone_on_from = gone_on_from or self._round() + 1
                if self._round() > gone_on_from:
                    return "went_on"
            time.sleep(0.1)
        return "hangs"

    def _roles(self, leader: int) -> dict[int, str]:
        return roles_of(leader)

    def _is_left(self, pid: int) -> bool:
        return state_of(pid) not in ("", "Z")

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return next((line for line in reversed(lines) if line.startswith("tailrace: ")), "")[:300]


class ServiceVictim(FrozenVictim):
    """A run on a service with Tinker's API. Each life ends by the death of the run or of the service."""

    def __init__(self, folder: Path, options: Mapping[str, str] = OPTIONS) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        at_service = {
            "engine.kind": "tinker",
            "engine.urls": json.dumps([f"http://127.0.0.1:{self._port}"]),
            "engine.base_model": "quickstart",
            "engine.chunk_tokens": "32",
            "trainer.kind": "tinker",
            "algorithm.old_policy": "recorded",
        }
        super().__init__("april", KILLED["april"], folder, {**options, **at_service})
        os.environ["TINKER_API_KEY"] = "tml-a-key-of-the-benchmark"
        self._start_service()

    def live_and_die(self, chance: random.Random, life_s: float = LIFE_S) -> None:
        process, before = self._start(ENDLESS), self._lives_that_drew()
        self._wait(process, lambda: self._lives_that_drew() > before, "it did not come back to life")
        time.sleep(chance.uniform(0, life_s))
        if chance.random() < 1 / 2:
            kill(process)
        else:
            kill(self._service)
            self._start_service()
            if process.wait(PATIENCE_S) != 1:
                raise SystemExit(
                    f"the run outlived its service: {self.log.read_text(encoding='utf-8')[-4000:]}"
                )
        self._compare()

    def close(self) -> None:
        kill(self._service)

    def freeze(self, chance: random.Random) -> str:
        words = super().freeze(chance)
        if self._process is not None:
            self._end(roles_of(self._process.pid))
        kill(self._service)
        self._start_service()
        return words

    def _roles(self, leader: int) -> dict[int, str]:
        service = roles_of(self._service.pid)
        return roles_of(leader) | {pid: f"the service's {role}" for pid, role in service.items()}

    def _is_left(self, pid: int) -> bool:
        return super()._is_left(pid) and pid not in roles_of(self._service.pid)

    def _start_service(self) -> None:
        model = str(EXAMPLES / "quickstart" / "model")
        words = [sys.executable, "-m", "tailrace.cli", "serve", model, "--tinker", "--port", str(self._port)]
        words += ["--served-model-name", "quickstart", "--state-folder", str(self.folder.parent / "service")]
        words += ["--health-timeout-s", str(HEALTH_S), "--host.health_timeout_s", str(HEALTH_S)]
        environment = {**os.environ, "TAILRACE_TOKEN": os.environ["TINKER_API_KEY"]}
        self._service = subprocess.Popen(
            words, start_new_session=True, stdout=subprocess.PIPE, env=environment
        )
        assert self._service.stdout is not None
        if not self._service.stdout.readline().startswith(b"serving"):
            raise SystemExit("the service did not start")


class RequestsSink:
    """Sink: a line for each round, and for each request as it starts and ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")  # a kill loses no line

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
    """Those of each thread: the kernel lists them by the thread that has started them."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):
            found += map(int, children.read_text(encoding="utf-8").split())
    return found


def roles_of(leader: int) -> dict[int, str]:
    """The name of each process of a run, whose controller is the leader."""
    roles = {leader: "controller"}
    for child in children_of(leader):
        name = "fork server" if child in running(leader, "forkserver") else "resource tracker"
        pids = {child: name}
        for pid in tree(child)[1:]:
            with suppress(FileNotFoundError):
                pids[pid] = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        names = Counter[str]()
        for pid, name in pids.items():
            names[name] += 1
            roles[pid] = f"{name} ({names[name]})" if names[name] > 1 else name
    return roles


def chosen(roles: Mapping[int, str], chance: random.Random, spared: set[int]) -> int:
    """A process of a random role, each kind of which is as likely."""
    kinds: dict[str, list[int]] = {}
    for pid in roles.keys() - spared:
        kinds.setdefault(re.sub(r"-\d+| \(\d+\)", "", roles[pid]), []).append(pid)
    return chance.choice(sorted(kinds[chance.choice(sorted(kinds))]))


def state_of(pid: int) -> str:
    """The state of a process; empty: it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""


def workers_of(pid: int, role: str, kind: str = "native") -> list[int]:
    """The workers of a role that a controller has now, those that start included. `kind`: of engines."""
    found = [each for server in running(pid, "forkserver") for each in running(server, f"comm {role}")]
    is_here = role != "engine" or kind == "native"
    return found if is_here else [server for parent in found for server in children_of(parent)]


def running(pid: int, word: str) -> list[int]:
    """The children of a process with a word in their command or name."""
    found = []
    for child in children_of(pid):
        with suppress(FileNotFoundError):
            command, name = (Path(f"/proc/{child}/{file}").read_bytes() for file in ("cmdline", "comm"))
            if command and word.encode() in command + b"comm " + name:  # a zombie has no command
                found.append(child)
    return found


CALLS_VARIABLE, CALLS = "TAILRACE_CALLS", "calls.jsonl"
CALL_S = 0.2

Key = tuple[str, int, int]
"""Sample, turn and number of a call."""


def calculator(expression: str) -> str:
    """Multiply whole numbers.

    Args:
        expression: The product, for example "12 * 34".
    """
    time.sleep(CALL_S)  # so that kills come while it works
    answer = str(math.prod(int(factor) for factor in expression.split("*")))
    caller = CALLER.get()
    line = json.dumps([str(caller.sample), caller.turn, caller.number]) + "\n"
    with Path(os.environ[CALLS_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(line)
    return answer


class EpisodeVictim(Victim):
    """A run with tools. After each life, what it did is compared with what the ledger had before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        os.environ[CALLS_VARIABLE] = str(self.folder / CALLS)
        self.turns_regenerated = self.calls_repeated = self.calls_lost = self.num_calls = 0
        self._calls: set[Key] = set()
        """Calls that had answered in earlier lives."""
        self._recorded: set[Key] = set()
        """Calls whose answer the ledger had at the end of the last life."""
        self._ended: dict[str, int] = {}
        """Tokens of the ended turns of each sample that the ledger had at the end of the last life."""
        self._lines = {CALLS: 0, REQUESTS: 0}

    def _compare(self) -> None:
        super()._compare()
        for event in self._new_lines(REQUESTS):
            if "sample" in event and "outcome" not in event:
                self.turns_regenerated += event["tokens"] < self._ended.get(event["sample"], 0)
        for sample, turn, number in self._new_lines(CALLS):
            key = (sample, turn, number)
            self.num_calls += 1
            self.calls_repeated += key in self._recorded
            self.calls_lost += key in self._calls - self._recorded
            self._calls.add(key)
        with suppress(LedgerError):
            for id, row in self.books().samples.items():
                turns = row.turns
                self._ended[str(id)] = turns[-1].num_tokens if turns else 0
                self._recorded |= {
                    (str(id), number, place)
                    for number, turn in enumerate(turns)
                    for place, result in enumerate(turn.results)
                    if result is not None
                }

    def _new_lines(self, name: str) -> list[Any]:
        path = self.folder / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        new, self._lines[name] = lines[self._lines[name] :], len(lines)
        return [json.loads(line) for line in new]


def found_in(victims: Sequence[Victim]) -> Counter[str]:
    """What the audits of runs that ended found, summed, and what the kills cost."""
    results = Counter[str]()
    for victim in victims:
        books = victim.books()
        results.update(victim.audit()._asdict())
        results["tokens_generated"] += counted_tokens(victim.folder / "counts")
        results["tokens_wasted_by_kills"] += totals_of(books).wasted_tokens["crash"]
        results["samples_trained_again"] += sum(each.undone is not None for each in books.trainings.values())
    return results


def found_of_pins(victims: Sequence[Victim]) -> Counter[str]:
    """What is wrong with the versions of samples and the sizes of groups."""
    results = Counter[str](other_version=0, groups_not_of_k=0)
    for victim in victims:
        books = victim.books()
        for sample in books.samples.values():
            places = [(span.life, span.version) for span in sample.spans]
            results["other_version"] += sum(
                span.num_tokens
                for span, place in zip(sample.spans, places, strict=True)
                if distance(books.lives, places[0], place)
            )
        trained = Counter(each.prompt for each in books.trainings.values() if each.undone is None)
        size = json.loads(max(books.lives.values(), key=lambda life: life.life).config)["run"]["group_size"]
        whole = [row.prompt for row in books.groups.values() if row.fate == "trained"]
        results["groups_not_of_k"] += sum(trained[prompt] != size for prompt in whole)
    return results


def found_of_probes(victim: Victim) -> Counter[str]:
    """What the engines of a run say of the versions that they served."""
    events = [*LogReader(victim.folder / "events.jsonl").read()]
    published = {0, *(event.version for event in events if isinstance(event, Published))}
    arrivals = [event.arrival for event in events if isinstance(event, WeightsProbed)]
    served = {span.version for sample in victim.books().samples.values() for span in sample.spans}
    restarts = re.findall(r"tailrace: restart \d+ of", victim.log.read_text(encoding="utf-8"))
    return Counter(
        restarts=len(restarts),
        probes=len(arrivals),
        not_arrived=sum(bool(arrival.cause) for arrival in arrivals),
        not_published=len((served | {arrival.version for arrival in arrivals}) - published),
    )


def crash(kills: int, seed: int, options: Mapping[str, str], task: str) -> dict[str, float]:
    """Kill and resume runs; what was found, summed over the runs."""
    chance, life_s = random.Random(seed), REAL_LIFE_S if task == "real" else LIFE_S
    with tempfile.TemporaryDirectory() as name:
        if task == "papers":
            victims = [Victim(paper, None, Path(name), options, f"{paper}.toml") for paper in PAPERS]
        else:
            schedules = {"real": REAL, "pinned": PINNED, "verified": VERIFIED}.get(task, KILLED)
            example = "smollm2/long_tail.toml" if task == "real" else EXAMPLE["native"]
            victims = [Victim(each, schedules[each], Path(name), options, example) for each in schedules]
            if task == "verified":
                (folder := Path(name, "episodes")).mkdir()
                calculator = json.dumps([f"{EXAMPLES}/tools/calculator.py:calculator"])
                words = {"environment.calls_have_effects": "false", "environment.functions": calculator}
                victims.append(Victim("april", VERIFIED["april"], folder, {**options, **words}, "tools.toml"))
        for number in range(kills):
            victim = victims[number % len(victims)]
            victim.live_and_die(chance, life_s)
            print(f"kill {number + 1:3} of {kills}: {victim.folder.name}", flush=True)
        for victim in victims:
            victim.live_to_the_end()
        pins = found_of_pins(victims) if task == "pinned" else {}
        return {"kills": kills, **found_in(victims), **pins}


def crash_tools(kills: int, seed: int) -> dict[str, float]:
    """Kill and resume a run of episodes with tools; what was found."""
    chance = random.Random(seed)
    options = OPTIONS | WITH_REQUESTS | {"environment.functions": json.dumps([f"{__file__}:calculator"])}
    with tempfile.TemporaryDirectory() as name:
        victim = EpisodeVictim("april", KILLED["april"], Path(name), options, "tools.toml")
        victim.live(ROUNDS_TO_LEARN)
        for number in range(kills):
            victim.live_and_die(chance)
            print(f"kill {number + 1:3} of {kills}: {victim.num_calls} calls", flush=True)
        victim.live_to_the_end()
        return {
            "kills": kills,
            **found_in([victim]),
            "turns_regenerated": victim.turns_regenerated,
            "calls_repeated": victim.calls_repeated,
            "calls_lost": victim.calls_lost,
            "calls": victim.num_calls,
        }


def crash_service(kills: int, seed: int) -> dict[str, float]:
    """Kill a run on a service, or the service, and resume; what was found."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, closing(ServiceVictim(Path(name))) as victim:
        for number in range(kills):
            victim.live_and_die(chance)
            print(f"kill {number + 1:3} of {kills}", flush=True)
        victim.live_to_the_end()
        return {"kills": kills, **found_in([victim])}


def crash_frozen(cases: int, seed: int, task: str) -> dict[str, float]:
    """Freeze and kill processes of runs, and resume these; what was found."""
    chance, results = random.Random(seed), Counter[str]()
    schedules = ["service"] if task == "service" else [*FROZEN, *(["service"] if find_spec("tinker") else [])]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        for number, schedule in enumerate(schedules):
            if not (share := len(range(number, cases, len(schedules)))):
                break
            options = OPTIONS | HEALTHY | WITH_REQUESTS | {"run.eval_every": "0"}
            if schedule == "service":
                (folder := Path(name, "service")).mkdir()  # its run is named april, too
                victim: FrozenVictim = stack.enter_context(closing(ServiceVictim(folder, options)))
            else:
                options |= ADAPTERS if schedule in PINNED else {"engine.replicas": "2"}
                victim = FrozenVictim(schedule, FROZEN[schedule], Path(name), options)
            for _ in range(share):
                print(victim.freeze(chance), flush=True)
            victim.live_to_the_end()
            found = {**victim.found, **found_in([victim])}
            print(f"{schedule}: {', '.join(f'{key} {value}' for key, value in found.items())}", flush=True)
            results.update({"cases": share, **found})
    return dict(results)


def lose(
    kills: int, seed: int, kind: str, task: str, roles: Sequence[Sequence[str]], parallel: int = 1
) -> dict[str, float]:
    """Kill processes of runs that go on (`Victim.lose`); what was found, summed over the runs. `parallel`:
    processes of the trainer."""
    chance, results = random.Random(seed), Counter[str]()
    schedules = PINNED if task == "pinned" else LOSING
    options = OPTIONS | WITH_REQUESTS | {"engine.replicas": str(REPLICAS[kind])}
    options |= ADAPTERS if task == "pinned" else {}
    options |= {"trainer.restarts": str(kills)} if roles is TRAINERS else {}
    options |= {"trainer.tensor_parallel": str(parallel)}
    with tempfile.TemporaryDirectory() as name:
        for number, schedule in enumerate(schedules):
            victim = Victim(schedule, schedules[schedule], Path(name), options, EXAMPLE[kind])
            share = len(range(number, kills, len(schedules)))
            began_s = time.monotonic()
            victim.lose(share, kind, chance, roles)
            requests = victim.requests()
            results.update(found_in([victim]))
            results.update(found_of_pins([victim]) if task == "pinned" else {})
            results.update(found_of_probes(victim) if roles is TRAINERS else {})
            results["kills"] += share
            results["regenerated"] += regenerated_tokens(requests)
            results["requests_evicted"] += sum(each.get("outcome") == "evicted" for each in requests)
            print(f"{schedule}: {share} kills, {time.monotonic() - began_s:.0f} s", flush=True)
    return dict(results)


async def trials(
    config: RunConfig, candidate: BoundRun, repeats: int, folder: Path
) -> dict[bool, list[tuple[float, float]]]:
    """(main time, CPU time of the controller) of a round of the comparison, with the ledger and without."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    async with aclosing(SharedWorkers(folder)) as arena:
        for repeat in range(-1, repeats):  # the first is a warm-up
            for with_ledger in (True, False) if repeat % 2 else (False, True):
                parts, summary = await arena.parts(candidate), Summary()
                start, journal = first_life(), NullJournal()
                with ExitStack() as stack:
                    if with_ledger:
                        store = stack.enter_context(closing(Store.create(folder / f"{repeat}.sqlite")))
                        store.commit(start.opening)
                        commit = stack.enter_context(commits_on_thread(store))
                        journal = Journal(commit, start, flush_s=config.ledger.flush_s)
                    recorder = Recorder(StepMeter(summary, wall_clock=clock.wall_time))
                    began_s = time.process_time()
                    await execute(
                        candidate.schedule, parts, config.run, recorder, starting_point=start, journal=journal
                    )
                    cpu_s = time.process_time() - began_s
                if repeat >= 0:
                    found[with_ledger].append((over_rounds(summary.rows, "round/main_time_s"), cpu_s))
    return found


def cost(repeats: int) -> dict[str, float]:
    """What the ledger adds to its main time, and to the controller's CPU time in it."""
    config = load_config(EXAMPLES / "rolloutpipe.toml")
    candidate = BoundRun(config, resolve(config))  # it rehearses the schedule in a loop of its own
    with tempfile.TemporaryDirectory() as name:
        running = trials(config, candidate, repeats, Path(name))
        found = clock.run(running, virtual=False)
    (main_s, cpu_s), (main_without_s, cpu_without_s) = (
        map(median, zip(*found[with_ledger], strict=True)) for with_ledger in (True, False)
    )
    return {
        "main_time_s": main_s,
        "main_time_without_s": main_without_s,
        "ledger_share_of_main_time": main_s / main_without_s - 1,
        "ledger_cpu_share_of_main_time": (cpu_s - cpu_without_s) / main_without_s,
    }


def main(
    kill: Literal["all", "engines", "trainer"] = "all",
    task: Literal["sums", "tools", "papers", "pinned", "real", "service", "verified"] = "sums",
    kills: int = 50,
    engine: Literal["native", "vllm"] = "native",
    colocated: bool = False,
    parallel: int = 1,
    repeats: int = 7,
    freeze: int = 0,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    results: dict[str, float] = {}
    if freeze:
        results = crash_frozen(freeze, seed, task)
        repeats = 0
    elif kill == "engines":
        results = lose(kills, seed, engine, task, ENGINES)
    elif kill == "trainer":
        results = lose(kills, seed, engine, "pinned", TRAINERS, parallel)
    elif task == "service":
        results = crash_service(kills, seed)
    elif task == "tools":
        results = crash_tools(kills, seed)
    elif kills:
        more = ASLEEP | {"placement.kind": "colocated"} if colocated else {}
        more |= ADAPTERS if task == "pinned" else {}
        results |= crash(kills, seed, OPTIONS | more, task)
    if kill == "all" and task == "sums" and repeats:
        results |= cost(repeats)
    for key, value in results.items():
        print(f"{key:32} {value:.4f}" if isinstance(value, float) else f"{key:32} {value}")
    write(json, results)
    faults = (*Found._fields, "hangs", "unnamed", "left_behind", "not_arrived", "not_published")
    if any(results.get(each) for each in faults):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
