"""What schedules learn from equally many samples, from several seeds. Results accumulate in small files.

    python benchmarks/learning.py STUDY [--seeds 5] [--samples N] [--only NAME,NAME] [--results DIR]
                                  [--folder DIR]
    python benchmarks/learning.py --report [--results DIR] [--page FILE] [--figures DIR] [--pages DIR]

The studies, their settings and the claims that they ask about are in studies.py:

lag         in-flight updates against conventional RL with G = 8, 16, 32, 64 and 1 steps a round
diverge     G = 64 for twenty rounds, with two learning rates
kl          how far sequences of mixed policies are from on-policy (kl_study.py)
april       april against serial, and with a bound on the age of a token
order       rolloutpipe, which trains short groups first, against serial
rollpacker  serial against tail batching that races prompts, or prompts and responses
rates       in-flight updates and G = 8, 16, 32, 64 at equal mean lags, at three learning rates
lagcurve    accuracy and reward after equal samples over the mean lag, of fifteen schedules
masked      a bound on lag that masks stale tokens, beside one that waits, and none
verified    pipelinerl that verifies stale tokens, with three bounds, beside pipelinerl without one and serial
kv          pipelinerl with the KV cache kept, recomputed at each publication, or recomputed on drift
critic      pipelinerl with the group's mean against a learned value function as its baseline
distillation  a model that GRPO has trained teaches a fresh one, against GRPO
episodes    pipelinerl against serial: updates within episodes of several turns
groups      groups of 8 against the first 4 of 8 to end, and against one sample a prompt
real        ten schedules on SmolLM2-135M and sums with a long tail of lengths
trl         TRL's GRPOTrainer on the task of `real`

One (schedule, seed) is run at a time, all schedules with one seed before the next. A run that has a file of
results is not repeated; one that was stopped goes on. `folder` has the files of unfinished runs.

A file has the curve of a run, thinned to 32 points: of each part of the run, the reward, effective sample
size, KL of the behaviour policy, mean and largest lag in optimizer steps and length of the trained samples;
and at its end, how many samples were trained and how many generated, the generated tokens and the seconds of
training. Of a run that masked tokens it has their share, of all and of each tenth of the response. R(S),
reward over samples, does not depend on how busy the machine is, but for schedules whose lag follows from the
rates of engine and trainer. Seconds do: `machine` says what share of it other processes had.

The report writes the tables of benchmarks/results/learning.md, means over the seeds with the half-widths of
95% intervals (Student's t), and the verdicts on all runs; into docs/why/results.md what decides on the claims
of claims.py, into docs/why/staleness.md what lag costs; and the figures that docs/ shows.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import fmean
from typing import Any

import learning_report
from common import EXAMPLES, run
from learning_report import CURVE, FIGURES, FORMAT, PAGE, PAGES, RESULTS, read_result
from studies import STUDIES, Study
from tailrace.api import load_config, train
from tailrace.config import RunConfig
from tailrace.errors import TailraceError
from tailrace.record.lags import TENTHS

ROOT = EXAMPLES.parent
POINTS = 32
QUIET = 0.05
"""Share of the machine that other processes have, below which seconds mean something."""
HELD_OUT = 1024
"""Prompts of an evaluation."""

Result = dict[str, Any]


class Machine:
    """How much of the machine's time others have, from when it is made on. Linux only."""

    def __init__(self) -> None:
        self.start = self.seconds()

    @staticmethod
    def seconds() -> tuple[float, float, float]:
        """Of all cores, of all busy ones, and of this process with the children that have ended."""
        try:
            fields = [
                int(each)
                for each in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
            ]
        except OSError:
            return 0.0, 0.0, 0.0
        ticks = os.sysconf("SC_CLK_TCK")
        own = sum(each.ru_utime + each.ru_stime for each in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))
        return sum(fields) / ticks, (sum(fields) - fields[3] - fields[4]) / ticks, own

    def note(self) -> Result:
        total, busy, own = (after - before for before, after in zip(self.start, self.seconds(), strict=True))
        others = max(0.0, busy - own) / total if total else None
        quiet = others is not None and others < QUIET
        note: Result = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
        return note | {"nice": os.nice(0), "others": others and round(others, 3), "quiet": quiet}


def processor() -> str:
    """The name of the processor."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def git(*words: str) -> str:
    """What git says about this copy; "unknown" without git."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    return done.stdout.strip() or "unknown"


def made() -> Result:
    """With what a run was made. `src` is the git tree of src/, which a rebase of the commit keeps; "-dirty":
    tracked files differ."""
    commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    versions = {each: version(each) for each in ("torch", "transformers", "numpy")}
    return {
        "commit": commit,
        "src": git("rev-parse", "HEAD:src"),
        "python": platform.python_version(),
        **versions,
    }


def groups_of(parameters: Result) -> int:
    """Groups that a round trains."""
    steps = parameters.get("groups_per_step", 1) * parameters.get("steps_per_round", 1)
    return int(parameters.get("groups_per_round", steps))


def learn(study: Study, name: str, samples: int, seed: int, folder: Path) -> None:
    """Train the model of the study, or go on with that; the files of the run are in the folder."""
    settings = study.settings_of(name)
    if settings.get("algorithm.name") == "distillation":
        teacher = folder.with_name(f"teacher-{seed}")
        if not (teacher / "model").exists():
            learn(study, study.teacher, samples, seed, teacher)
        settings["teacher.path"] = str(teacher / "model")
    per_round = load_config(study.config, settings).run.num_trained * groups_of(study.schedules[name])
    rounds = samples // per_round
    if rounds < study.evaluations:
        raise SystemExit(f"--samples {samples}: that is {rounds} rounds of {per_round}; raise it")
    every = {"eval_every": rounds // study.evaluations, "eval_prompts": HELD_OUT}
    every |= {"checkpoint_every": rounds // study.checkpoints if study.checkpoints else 0}
    always = {f"run.{key}": value for key, value in {"seed": seed, "rounds": rounds, **every}.items()}
    config = load_config(study.config, {**always, "record.token_samples": 0, **settings})
    train_quietly(config.changed(schedule=study.schedules[name]), folder)


def train_quietly(config: RunConfig, folder: Path) -> None:
    """Train, or go on, without a line a step. What ends a run before its last round ends the program."""
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            train(config, folder, resume=(folder / "ledger.sqlite").exists())
    except TailraceError as why:
        raise SystemExit(f"{folder.name}: {why}") from None


def curve_of(rows: Sequence[dict[str, float]], scored_s: Sequence[float]) -> dict[str, list[float]]:
    """The curve of a run. `scored_s`: when its responses had their rewards, in order."""
    total = sum(row["samples/trained"] for row in rows if "loss" in row)
    curve: dict[str, list[float]] = {key: [] for key in CURVE}
    part: list[dict[str, float]] = []
    trained = generated = seconds = 0.0
    scored = 0
    for row in rows:
        generated += row.get("tokens/generated", 0.0)
        if "loss" not in row:
            continue
        part.append(row)
        trained, seconds = trained + row["samples/trained"], seconds + row["time/step"]
        while scored < len(scored_s) and scored_s[scored] <= row["time"]:
            scored += 1
        if trained < total * (len(curve["samples"]) + 1) / POINTS - 1e-9:
            continue
        samples, tokens = (sum(each[f"{key}/trained"] for each in part) for key in ("samples", "tokens"))
        whole = tokens + sum(each.get("tokens/masked", 0.0) for each in part)
        point = {
            "samples": trained,
            "generated": scored,
            "generated_tokens": generated,
            "seconds": seconds,
            "reward": sum(each["reward"] * each["samples/trained"] for each in part) / samples,
            "ess": fmean(each["ess"] for each in part),
            "kl": sum(each["mismatch_kl"] * each["tokens/trained"] for each in part) / max(1, tokens),
            "lag": sum(each["lag/mean"] * each["tokens/trained"] for each in part) / max(1, tokens),
            "lag_max": max(each["lag/max"] for each in part),
            "length": whole / samples,
        }
        for key, value in point.items():
            curve[key].append(float(f"{value:.4g}") if key not in ("samples", "generated") else int(value))
        part = []
    return curve


def masked_of(rows: Sequence[dict[str, float]]) -> Result:
    """The share of all completion tokens of trained samples that were masked, and that of each tenth of a
    response; nothing of a run that masked none."""
    steps = [(row, row["tokens/trained"] + row.get("tokens/masked", 0.0)) for row in rows if "loss" in row]
    total = sum(tokens for _, tokens in steps)
    keys = ["tokens/masked", *(f"masked/tenth/{tenth}" for tenth in range(TENTHS))]
    share, *tenths = (
        round(sum(row.get(key, 0.0) * (tokens if "tenth" in key else 1) for row, tokens in steps) / total, 4)
        for key in keys
    )
    return {"masked": {"share": share, "tenths": tenths}} if share else {}


def result_of(folder: Path) -> Result:
    """What is kept of one run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with (folder / "events.jsonl").open(encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines if line.startswith('{"event":"SampleScored"')]
    scored_s = [event["time_s"] for event in events if event["sample"][0] >= 0]  # others are held out
    trained = 0
    evaluations = []
    for row in rows:
        trained += row.get("samples/trained", 0)
        if "eval/reward" in row:
            evaluations.append([trained, round(row["eval/reward"], 4)])
    tokens = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["tokens"]
    return {
        "curve": curve_of(rows, scored_s),
        "evaluations": evaluations,
        "tokens": tokens,
        **masked_of(rows),
    }


def measure(study: Study, name: str, samples: int, seed: int, folder: Path) -> Result:
    """Run one schedule with one seed: its curve, and whatever else its runner finds."""
    if study.runner == "kl":
        from kl_study import divergences, training

        length = study.schedules[name]["length"]
        config = training(study.settings_of(name), length, seed)
        train_quietly(config, folder)
        return divergences(config, length, folder)
    if study.runner == "trl":
        from trl_peer import learning_curve

        settings = {"run.seed": seed, "run.eval_prompts": HELD_OUT, **study.settings_of(name)}
        return learning_curve(study.config, settings, study.schedules[name], samples, folder)
    learn(study, name, samples, seed, folder)
    return result_of(folder)


def head(name: str, schedule: str, samples: int, seed: int) -> Result:
    """What identifies a run. A file that differs from it in anything was measured otherwise."""
    study = STUDIES[name]
    settings = {key: value.replace(f"{ROOT}/", "") for key, value in study.settings_of(schedule).items()}
    found: Result = {"format": FORMAT, "study": name, "schedule": schedule, "seed": seed, "samples": samples}
    config = str(study.config.relative_to(ROOT))
    return found | {"parameters": study.schedules[schedule], "settings": settings, "config": config}


def file_of(results: Path, name: str, schedule: str, seed: int) -> Path:
    """Where the results of a run are."""
    plain = "".join(letter if letter.isalnum() or letter in "=-" else "_" for letter in schedule)
    return results / f"{name}-{plain}-{seed}.json"


def is_measured(path: Path, wanted: Result) -> bool:
    """Whether the file of a run is there. A file of another format or of other settings ends the program."""
    if not path.exists():
        return False
    found = read_result(path)
    if others := [key for key in wanted if found[key] != wanted[key]]:
        differs = ", ".join(f"{key} = {found[key]!r}, not {wanted[key]!r}" for key in others)
        raise SystemExit(f"{path}: it was measured with {differs}; name other --results")
    return True


def chosen(study: str, only: str) -> list[str]:
    """The schedules of a study that are asked for."""
    if study not in STUDIES:
        raise SystemExit(f"STUDY {study!r}: there is no such study; choose from {', '.join(STUDIES)}")
    there = list(STUDIES[study].schedules)
    names = only.split(",") if only else there
    if unknown := [name for name in names if name not in there]:
        raise SystemExit(f"--only {', '.join(unknown)}: not in {study}; it has {', '.join(there)}")
    return names


def main(
    study: str = "",
    *,
    seeds: int = 5,
    samples: int = 0,
    only: str = "",
    results: Path = RESULTS,
    folder: Path = ROOT / "runs" / "learning",
    report: bool = False,
    page: Path = PAGE,
    figures: Path = FIGURES,
    pages: Path = PAGES,
) -> None:
    if report:
        learning_report.write(results, page, figures, pages)
        return
    names = chosen(study, only)
    samples = samples or STUDIES[study].samples
    results.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for name in names:
            wanted, path = head(study, name, samples, seed), file_of(results, study, name, seed)
            if is_measured(path, wanted):
                continue
            place, machine = folder / path.stem, Machine()
            found = measure(STUDIES[study], name, samples, seed, place)
            result = {**wanted, "made": made(), "machine": machine.note(), **found}
            part = path.with_suffix(".part")
            part.write_text(compact(result), encoding="utf-8")
            part.rename(path)
            shutil.rmtree(place, ignore_errors=True)
            print(path, flush=True)


def compact(result: Result) -> str:
    """JSON with a line for each key, and for each column of a curve."""
    nested = ("curve", "divergences")
    lines = [
        f" {json.dumps(key)}: {{\n  "
        + ",\n  ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
        + "\n }"
        if key in nested
        else f" {json.dumps(key)}: {json.dumps(value)}"
        for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    run(main)
