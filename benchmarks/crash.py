"""Is anything lost when a run is killed, and what does it cost to lose nothing?

    python benchmarks/crash.py [--kills N] [--repeats N] [--seed N] [--json F]

Live runs of the quickstart's model, of april and of rolloutpipe, are killed with SIGKILL, controller and
workers at once, at random moments of their start and of their training, and resumed each time; in the end
each runs to its last round, where `Run.finish` compares the ledger with the engines' own counts. Then it is
audited by what it does not write itself: the engines' counts, and samples/, which says what was trained.

    tokens_unaccounted   the engines' counts, all lives together, less trained, held, wasted and evaluated
    trained_twice        samples that the surviving lineage of checkpoints contains twice
    lost                 prompts drawn, or samples trained, that the ledger does not know of or forgot

The cost: the same rounds of the race with the ledger in SQLite and without one, in turn, on the same workers.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tailrace import clock
from tailrace.commands.live import open_parts, rewind
from tailrace.config import RunConfig, load_config
from tailrace.controller.execution import execute
from tailrace.engine.counter import counted_tokens
from tailrace.errors import LedgerError
from tailrace.ledger.base import Books
from tailrace.ledger.journal import Journal, NullJournal, commits_on_thread
from tailrace.ledger.read import read_books
from tailrace.ledger.recovery import StartingPoint, first_life, held_tokens_of, totals_of
from tailrace.ledger.sqlite import SqliteStore
from tailrace.record.events import Recorder
from tailrace.record.steps import RoundMeter
from tailrace.schedules.resolve import BoundSchedule, resolve

EXAMPLES = Path(__file__).parent.parent / "examples"
SCHEDULES = {
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "rolloutpipe": {"groups_per_round": 8, "groups_per_step": 4},
}
OPTIONS = {"run.checkpoint_every": "2", "run.eval_every": "5", "run.eval_prompts": "32"}
ENDLESS = 100_000
KEPT_CHECKPOINTS = 3
LIFE_S, START_S = 2.5, 6.0
"""A kill comes within so many seconds after a life began to train; or, one in eight, after it was spawned."""
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Found:
    """What an audit found wrong."""

    tokens_unaccounted: int
    trained_twice: int
    lost: int


class Victim:
    """A run that is killed and resumed."""

    def __init__(self, name: str, folder: Path, chance: random.Random) -> None:
        self.folder = folder / name
        self._chance = chance
        self._drawn: dict[int, int] = {}
        self.forgotten = 0
        text = (EXAMPLES / "quickstart" / "quickstart.toml").read_text()
        self._config = folder / f"{name}.toml"
        head, _, rest = text.partition("[schedule]")
        rest = rest[rest.index("[model]") :].replace('"model"', f'"{EXAMPLES / "quickstart" / "model"}"')
        parameters = "\n".join(f"{key} = {value}" for key, value in SCHEDULES[name].items())
        self._config.write_text(f'{head}[schedule]\nname = "{name}"\n{parameters}\n\n{rest}')

    def live_and_die(self) -> None:
        """One life, killed at a random moment."""
        process = self._start(ENDLESS)
        if self._chance.random() < 1 / 8:
            time.sleep(self._chance.uniform(0, START_S))
        else:
            self._wait_for_a_life(process)
            time.sleep(self._chance.uniform(0, LIFE_S))
        kill(process)
        self._compare()
        for old in sorted((self.folder / "checkpoints").glob("round_??????"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def live_to_the_end(self) -> None:
        """The last life, two rounds long."""
        begun = (self.folder / "ledger.sqlite").exists()  # a kill may have come before
        marks = self.books().marks if begun else []
        rounds = 2 + max((mark.round for mark in marks if mark.undone is None), default=0)
        process = self._start(rounds)
        if process.wait() != 0:
            raise SystemExit(f"the last life of {self.folder.name} failed: {self._said()}")
        self._compare()

    def books(self) -> Books:
        with closing(SqliteStore.open(self.folder / "ledger.sqlite", only_read=True)) as store:
            return read_books(store)

    def audit(self) -> Found:
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

    def _start(self, rounds: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tailrace.cli", "train", str(self._config)]
        words += ["--output-dir", str(self.folder), "--run.rounds", str(rounds), "--resume"]
        words += [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
        self._log = self.folder.with_suffix(".log")
        with self._log.open("wb") as output:
            return subprocess.Popen(words, start_new_session=True, stdout=output, stderr=output)

    def _wait_for_a_life(self, process: subprocess.Popen[bytes]) -> None:
        """Until the ledger says that a new one began to train."""
        before, waited_s = self._lives_that_drew(), 0.0
        while self._lives_that_drew() == before:
            if process.poll() is not None or waited_s > PATIENCE_S:
                raise SystemExit(f"{self.folder.name} did not come back to life: {self._said()}")
            time.sleep(0.05)
            waited_s += 0.05

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
        return self._log.read_text()[-2000:]


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the controller and every worker, each of which leads a group."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for leader in [process.pid, *map(int, children)]:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    process.wait()


def crash(kills: int, seed: int) -> dict[str, float]:
    """Kill and resume; what was found, summed over the runs."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        victims = [Victim(schedule, Path(name), chance) for schedule in SCHEDULES]
        for number in range(kills):
            victim = victims[number % len(victims)]
            victim.live_and_die()
            print(f"kill {number + 1:3} of {kills}: {victim.folder.name}", flush=True)
        found, crash_tokens, generated, again = [], 0, 0, 0
        for victim in victims:
            victim.live_to_the_end()
            found.append(victim.audit())
            books = victim.books()
            crash_tokens += totals_of(books).wasted_tokens["crash"]
            generated += counted_tokens(victim.folder / "counts")
            again += sum(training.undone is not None for training in books.trainings.values())
    return {
        "kills": kills,
        "tokens_unaccounted": sum(abs(each.tokens_unaccounted) for each in found),
        "trained_twice": sum(each.trained_twice for each in found),
        "lost": sum(each.lost for each in found),
        "tokens_generated": generated,
        "tokens_wasted_by_kills": crash_tokens,
        "samples_trained_again": again,
    }


async def laps(
    config: RunConfig, schedule: BoundSchedule, repeats: int, folder: Path
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(main time, CPU time of the controller) of a round of the race, with the ledger and without."""
    written: list[tuple[float, float]] = []
    unwritten: list[tuple[float, float]] = []
    async with open_parts(config, folder) as parts:
        start = folder / "start"
        await parts.trainer.save(start)

        async def lap(starting_point: StartingPoint, journal: Journal | NullJournal) -> tuple[float, float]:
            await rewind(parts, start, version=0)
            meter, began_s = RoundMeter(), time.process_time()
            await execute(
                schedule, parts, config.run, Recorder(meter), starting_point=starting_point, journal=journal
            )
            return fmean(report.main_time_s for report in meter.reports), time.process_time() - began_s

        for repeat in range(-1, repeats):  # the first is a warm-up
            for with_ledger in (True, False) if repeat % 2 else (False, True):
                starting_point = first_life()
                if with_ledger:
                    store = SqliteStore.create(folder / f"{repeat}.sqlite")
                    store.commit(starting_point.opening)
                    with closing(store), commits_on_thread(store) as commit:
                        figures = await lap(
                            starting_point, Journal(commit, starting_point, flush_s=config.ledger.flush_s)
                        )
                else:
                    figures = await lap(starting_point, NullJournal())
                if repeat >= 0:
                    (written if with_ledger else unwritten).append(figures)
    return written, unwritten


def cost(repeats: int) -> dict[str, float]:
    """What the ledger adds to the race's main time, and to the controller's CPU time in it."""
    config = load_config(EXAMPLES / "rolloutpipe.toml")
    schedule = resolve(config)
    with tempfile.TemporaryDirectory() as name:
        written, unwritten = clock.run(laps(config, schedule, repeats, Path(name)), virtual=False)
    main_s, main_without_s = (median(lap[0] for lap in each) for each in (written, unwritten))
    cpu_s, cpu_without_s = (median(lap[1] for lap in each) for each in (written, unwritten))
    return {
        "main_time_s": main_s,
        "main_time_without_s": main_without_s,
        "ledger_share_of_main_time": main_s / main_without_s - 1,
        "ledger_cpu_share_of_main_time": (cpu_s - cpu_without_s) / main_without_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="0: none (50)")
    parser.add_argument("--repeats", type=int, default=7, help="of the cost's measurement; 0: none (7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="F")
    options = parser.parse_args()
    results: dict[str, float] = {}
    if options.kills:
        results |= crash(options.kills, options.seed)
    if options.repeats:
        results |= cost(options.repeats)
    for key, value in results.items():
        print(f"{key:32} {value:.4f}" if isinstance(value, float) else f"{key:32} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
