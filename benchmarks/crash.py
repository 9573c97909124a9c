"""Is anything lost when a run or an engine is killed, and what does it cost to lose nothing?

    python benchmarks/crash.py [--kill all|engines] [--engine native|vllm] [--task sums|tools] [--kills N]
                               [--repeats N] [--seed N] [--json F]

--kill all: live runs of the quickstart's model, of april and of rolloutpipe, are killed with SIGKILL,
controller and workers at once, at random moments of their start and of their training, and resumed each time;
in the end each runs to its last round, where `Run.finish` compares the ledger with the engines' own counts.

--kill engines: live runs of april, pipelinerl and tailrace, on three native engines or two vLLM servers, lose
one engine after another to SIGKILL at random moments, also one that is being restarted. Each run must end by
itself after its last round.

--task tools: instead, a run of april on the example with tools is killed with SIGKILL, also while tools work.

Then a run is audited by what its ledger does not write itself: the engines' counts, samples/, which says what
was trained, and a sink that writes every request down.

    tokens_unaccounted   the engines' counts, all lives together, less trained, held, wasted and evaluated
    trained_twice        samples that the surviving lineage of checkpoints contains twice
    lost                 prompts drawn, or samples trained, that the ledger does not know of or forgot
    regenerated          tokens that had arrived and were generated again for the same sample
    turns_regenerated    (tools) turns that the ledger had as ended, and that were generated again
    calls_repeated       (tools) calls whose answer the ledger had, and that were made again
    calls_lost           (tools) calls that returned just before a kill, whose answer no episode had used, and
                         that were made again

The cost (--kill all): the same rounds of the race with the ledger in SQLite and without one, in turn, on the
same workers.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import median

from episodes import EpisodeVictim
from tailrace import clock
from tailrace.commands.live import open_parts, rewind
from tailrace.config import RunConfig, load_config
from tailrace.controller.execution import execute
from tailrace.engine.base import counted_tokens
from tailrace.ledger.journal import Journal, NullJournal, commits_on_thread
from tailrace.ledger.recovery import StartingPoint, first_life, totals_of
from tailrace.ledger.sqlite import SqliteStore
from tailrace.record.events import Recorder
from tailrace.record.figures import over_rounds
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.schedules.resolve import BoundSchedule, resolve
from victims import EXAMPLES, Victim, regenerated_tokens

KILLED: dict[str, dict[str, object]] = {
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "rolloutpipe": {"groups_per_round": 8, "groups_per_step": 4},
}
"""Schedules whose runs are killed."""
LOSING: dict[str, dict[str, object]] = {
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "pipelinerl": {"groups_per_step": 8, "in_flight_per_engine": 48, "ring_groups": 16, "ring_full": "block"},
    "tailrace": {"groups_per_step": 8, "groups_in_flight": 16, "staleness": 2},
}
"""Schedules that lose engines."""
ROUNDS_TO_LEARN = 16
"""Before the first kill: then most episodes call the tool."""
OPTIONS = {"run.checkpoint_every": "2", "run.eval_every": "5", "run.eval_prompts": "32"}
EXAMPLE = {"native": "quickstart/quickstart.toml", "vllm": "vllm.toml"}
REPLICAS = {"native": 3, "vllm": 2}


def crash(kills: int, seed: int) -> dict[str, float]:
    """Kill and resume runs; what was found, summed over the runs."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        victims = [Victim(schedule, KILLED[schedule], Path(name), OPTIONS) for schedule in KILLED]
        for number in range(kills):
            victim = victims[number % len(victims)]
            victim.live_and_die(chance)
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


def crash_tools(kills: int, seed: int) -> dict[str, float]:
    """Kill and resume a run of episodes with tools; what was found."""
    chance, here = random.Random(seed), Path(__file__).parent
    options = OPTIONS | {
        "environment.functions": json.dumps([f"{here / 'episodes.py'}:calculator"]),
        "record.sinks": json.dumps([f"{here / 'victims.py'}:requests_sink"]),
    }
    with tempfile.TemporaryDirectory() as name:
        victim = EpisodeVictim("april", KILLED["april"], Path(name), options, "tools.toml")
        victim.live(ROUNDS_TO_LEARN)
        for number in range(kills):
            victim.live_and_die(chance)
            print(f"kill {number + 1:3} of {kills}: {victim.num_calls} calls", flush=True)
        victim.live_to_the_end()
        found, totals = victim.audit(), totals_of(victim.books())
        return {
            "kills": kills,
            "tokens_unaccounted": abs(found.tokens_unaccounted),
            "trained_twice": found.trained_twice,
            "lost": found.lost,
            "turns_regenerated": victim.turns_regenerated,
            "calls_repeated": victim.calls_repeated,
            "calls_lost": victim.calls_lost,
            "calls": victim.num_calls,
            "tokens_generated": counted_tokens(victim.folder / "counts"),
            "tokens_wasted_by_kills": totals.wasted_tokens["crash"],
        }


def lose_engines(kills: int, seed: int, kind: str) -> dict[str, float]:
    """Kill engines of runs that go on; what was found, summed over the runs."""
    chance, results = random.Random(seed), Counter[str]()
    options = OPTIONS | {
        "engine.replicas": str(REPLICAS[kind]),
        "record.sinks": json.dumps([f"{Path(__file__).with_name('victims.py')}:requests_sink"]),
    }
    with tempfile.TemporaryDirectory() as name:
        for number, schedule in enumerate(LOSING):
            victim = Victim(schedule, LOSING[schedule], Path(name), options, EXAMPLE[kind])
            share = len(range(number, kills, len(LOSING)))
            began_s = time.monotonic()
            victim.lose_engines(share, kind, chance)
            requests, found = victim.requests(), victim.audit()
            results["kills"] += share
            results["tokens_unaccounted"] += abs(found.tokens_unaccounted)
            results["regenerated"] += regenerated_tokens(requests)
            results["lost"] += found.lost + found.trained_twice
            results["tokens_generated"] += counted_tokens(victim.folder / "counts")
            results["requests_evicted"] += sum(each.get("outcome") == "evicted" for each in requests)
            print(f"{schedule}: {share} kills, {time.monotonic() - began_s:.0f} s", flush=True)
    return dict(results)


async def laps(
    config: RunConfig, schedule: BoundSchedule, repeats: int, folder: Path
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(main time, CPU time of the controller) of a round of the race, with the ledger and without."""
    written: list[tuple[float, float]] = []
    unwritten: list[tuple[float, float]] = []
    async with open_parts(config, folder) as parts:
        start = folder / "start"
        await (await parts.trainer.save(start))

        async def lap(starting_point: StartingPoint, journal: Journal | NullJournal) -> tuple[float, float]:
            await rewind(parts, start, version=0)
            summary, began_s = Summary(), time.process_time()
            recorder = Recorder(StepMeter(summary, wall_clock=clock.wall_time))
            await execute(
                schedule, parts, config.run, recorder, starting_point=starting_point, journal=journal
            )
            return over_rounds(summary.rows, "round/main_time_s"), time.process_time() - began_s

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
    parser.add_argument("--kill", choices=("all", "engines"), default="all", help="what is killed (all)")
    parser.add_argument("--task", choices=("sums", "tools"), default="sums", help="with --kill all (sums)")
    parser.add_argument("--kills", type=int, default=50, help="0: none (50)")
    parser.add_argument("--engine", choices=tuple(REPLICAS), default="native", help="with --kill engines")
    parser.add_argument("--repeats", type=int, default=7, help="of the cost's measurement; 0: none (7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="F")
    options = parser.parse_args()
    results: dict[str, float] = {}
    if options.kill == "engines":
        results = lose_engines(options.kills, options.seed, options.engine)
    elif options.task == "tools":
        results = crash_tools(options.kills, options.seed)
    elif options.kills:
        results |= crash(options.kills, options.seed)
    if options.kill == "all" and options.task == "sums" and options.repeats:
        results |= cost(options.repeats)
    for key, value in results.items():
        print(f"{key:32} {value:.4f}" if isinstance(value, float) else f"{key:32} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
