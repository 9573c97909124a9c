"""How far from on-policy is what new weights met half-way? Fig. 7 of PipelineRL, on the quickstart's model.

    python benchmarks/kl_study.py [--checkpoints DIR] [--starts 0,10,25] [--json FILE] [--figure FILE]

Trains that model, a checkpoint an optimizer step; DIR keeps them for another time. From each start C, and for
lags g up to 32, responses to held-out prompts are written by

    lag         C to the end: conventional RL, g steps later
    recomputed  C, then C+1, ... C+g: the weights change at token t_1 = 2 L / 32, then every L / 32 tokens
                (eq. 8), and the cache is recomputed each time
    kept        the same, and the cache is kept: what an in-flight update does

in the embedded engine, all responses in step. Printed is KL(behaviour || C+g): the sum over all tokens of the
responses, exact over the vocabulary at each (kl_policies.py), divided by their number; and the same of the
tokens from t_1 on, the only ones that an update can reach. The paper tells neither how it estimates and
averages, nor from how many responses.

L is 128: the longest sums, worked out, take 112 tokens. A response ends where it ends; one shorter than t_1
meets no update. At g = 32 the last update would come at t_32 > L, so even the last tokens lag. All policies
draw with the same noise; intervals are the middle 95% of a bootstrap over prompts.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kl_policies import LENGTH, MAX_LAG, Array, Policy, divergence, mixed, respond, switch_positions
from tailrace.commands.train import train
from tailrace.config import RunConfig, load_config
from tailrace.data.open import open_prompts
from tailrace.data.tokenizer import load_tokenizer
from tailrace.types import KV, Prompt

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "quickstart.toml"
LAGS = (1, 2, 4, 8, 16, 32)
NUM_PROMPTS = 512
RESAMPLES = 2000
PARTS = {"all tokens": 0, "from t_1 on": switch_positions(1)[0]}
"""The first token of each."""
LABELS = {"lag": "lag g", "recomputed": "mixed, cache recomputed", "kept": "mixed, cache kept"}
COLOURS = {"lag": "#e2512f", "recomputed": "#2878b8", "kept": "#f3b33d"}
MUTED, FRAME = "#66727f", "#cbd2d9"
MIXED: dict[str, KV] = {"recomputed": "recompute", "kept": "keep"}


def resample(kl: Array) -> Array:
    """Nats a token, [1 + RESAMPLES]: of all prompts, then of draws of as many, the same for every policy."""
    n = len(kl)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    weights = np.vstack([np.ones(n), draws])
    nats: Array = weights @ np.nansum(kl, axis=1) / (weights @ np.isfinite(kl).sum(axis=1))
    return nats


def interval(values: Array) -> list[float]:
    """What all prompts give, and the middle 95% of the draws."""
    return [float(values[0]), *map(float, np.percentile(values[1:], [2.5, 97.5]))]


def summarise(kl: Mapping[str, Array]) -> dict[str, Any]:
    """Nats a token of each policy and of what the ordering is about, [all prompts, low, high]."""
    nats = {name: resample(values) for name, values in kl.items()}
    nats["lag - kept"] = nats["lag"] - nats["kept"]
    nats["kept - recomputed"] = nats["kept"] - nats["recomputed"]
    return {name: interval(values) for name, values in nats.items()}


def by_position(kl: Array) -> list[float]:
    """Nats a token of each L / 32 tokens that some response reaches."""
    totals = [(np.nansum(part), np.isfinite(part).sum()) for part in np.split(kl, MAX_LAG, axis=1)]
    return [float(total / count) for total, count in totals if count]


def mean_lag(lag: int, kl: Array, start: int = 0) -> float:
    """Of the tokens of a mixed policy, from one on."""
    updates = np.searchsorted(switch_positions(lag), np.arange(start, LENGTH), side="right")
    return float(np.average(lag - updates, weights=np.isfinite(kl[:, start:]).sum(0)))


def study(folders: Sequence[Path], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All lags from one start. folders: the checkpoints C, C+1, ... C+32."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    lagging = Policy(models[:1])
    old = respond(folders[0], lagging, prompts)
    rows, errors, kl = [], [], {}
    for lag in LAGS:
        kl["lag"], error = divergence(old, lagging, models[lag])
        errors.append(error)
        for name, kv in MIXED.items():
            policy = mixed(models, lag, kv)
            kl[name], error = divergence(respond(folders[0], policy, prompts), policy, models[lag])
            errors.append(error)
        row: dict[str, Any] = {"g": lag}
        for part, start in PARTS.items():
            row[part] = summarise({name: each[:, start:] for name, each in kl.items()})
            row[part]["mean lag of mixed"] = mean_lag(lag, kl["kept"], start)
        rows.append(row)
    same = [mixed(models[:1] * len(models), MAX_LAG, kv) for kv in MIXED.values()]
    control = [divergence(respond(folders[0], policy, prompts), policy, models[0])[0] for policy in same]
    return {
        "lags": rows,
        "identical checkpoints": float(np.nanmax(np.abs(control))),
        "engine and replay differ by": max(errors),
        "tokens a response": {name: float(np.isfinite(each).sum(1).mean()) for name, each in kl.items()},
        "by position": {name: by_position(each) for name, each in kl.items()},
    }


def report(start: int, result: Mapping[str, Any]) -> None:
    """The tables of one start."""
    columns = (*LABELS, "lag - kept", "kept - recomputed")
    for part in PARTS:
        print(f"from checkpoint {start}, {part}: nats a token [95%]")
        print("   g  mean lag " + " ".join(f"{name:>28}" for name in columns))
        for row in result["lags"]:
            cells = ["{:.5f} [{:.5f}, {:.5f}]".format(*row[part][name]) for name in columns]
            print(
                f"  {row['g']:2} {row[part]['mean lag of mixed']:9.1f} " + " ".join(f"{c:>28}" for c in cells)
            )
    print(f"  identical checkpoints: {result['identical checkpoints']:g}")
    print(f"  engine and replay differ by {result['engine and replay differ by']:.1e}", flush=True)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether the paper's ordering holds, in words. Surely: the interval of the difference excludes zero."""
    closer = sum(row["lag - kept"][1] > 0 for row in rows)
    farther = sum(row["lag - kept"][2] < 0 for row in rows)
    worse = sum(row["kept - recomputed"][1] > 0 for row in rows)
    better = sum(row["kept - recomputed"][2] < 0 for row in rows)
    shares = sorted(row["kept"][0] / row["lag"][0] for row in rows)
    stale = sorted(row["kept - recomputed"][0] / row["lag"][0] for row in rows)
    return (
        f"of {len(rows)} cases, mixed (cache kept) is surely closer to on-policy than lag g in {closer} and "
        f"surely farther in {farther}; its KL is {shares[0]:.0%} to {shares[-1]:.0%} of lag g's. Keeping the "
        f"cache is surely worse than recomputing it in {worse} and surely better in {better}; it adds "
        f"{stale[0]:+.1%} to {stale[-1]:+.1%} of lag g's KL."
    )


def draw(results: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """A column a start: KL over the lag, of all tokens and from t_1 on; and over the tokens of a response."""
    figure = Figure(figsize=(12, 8), dpi=120, facecolor="white", layout="constrained")
    grid = figure.subplots(len(PARTS) + 1, len(results), sharey="row", squeeze=False)
    for (start, result), column in zip(results.items(), grid.T, strict=True):
        for part, axes in zip(PARTS, column[:-1], strict=True):
            _draw_lags(axes, result["lags"], part)
            axes.set_title(f"from checkpoint {start}, {part}", fontsize=10)
        for name, blocks in result["by position"].items():
            places = np.arange(len(blocks)) * LENGTH / MAX_LAG
            column[-1].step(places, blocks, color=COLOURS[name], where="post", linewidth=1.2)
        column[-1].axvline(switch_positions(1)[0], color=MUTED, linestyle=":", linewidth=1)
        column[-1].set_title(f"by token of the response, g = {LAGS[-1]} (dotted: t_1)", fontsize=10)
        column[-1].set(xlabel="token", yscale="log")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=FRAME, linewidth=0.5)
    for axes in grid[:, 0]:
        axes.set_ylabel("KL to on-policy,\nnats a token")
    grid[0, 0].legend(frameon=False)
    figure.savefig(path)


def _draw_lags(axes: Axes, rows: Sequence[Mapping[str, Any]], part: str) -> None:
    for name, label in LABELS.items():
        nats, low, high = zip(*(row[part][name] for row in rows), strict=True)
        axes.plot(LAGS, nats, color=COLOURS[name], marker="o", markersize=3.5, label=label)
        axes.fill_between(LAGS, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.set(xlabel="lag g", xscale="log")
    axes.set_yscale("log", nonpositive="mask")  # recomputed from t_1 on has none at g = 1
    axes.set_xticks(LAGS, [str(lag) for lag in LAGS])
    axes.minorticks_off()


def training(num_steps: int) -> RunConfig:
    """The quickstart, on-policy, with one optimizer step and one checkpoint a round."""
    one_step = {"schedule.R": "16", "schedule.U": "16", "run.checkpoint_every": "1", "run.eval_every": "0"}
    return load_config(QUICKSTART, {"run.rounds": str(num_steps), **one_step})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, help="of an earlier study, or where to keep this one's")
    parser.add_argument("--starts", default="0,10,25", help="the checkpoints C")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    starts = [int(start) for start in arguments.starts.split(",")]
    config = training(max(starts) + MAX_LAG)
    assert config.model and config.data
    held_out = open_prompts(
        config.data, load_tokenizer(config.model.path), seed=config.run.seed, split="eval"
    )
    prompts = [held_out[index] for index in range(NUM_PROMPTS)]
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.checkpoints or Path(scratch) / "run"
        if not (folder / "checkpoints").exists():
            train(config, folder)
        folders = [folder / "checkpoints" / f"round_{step:06d}" for step in range(config.run.rounds + 1)]
        for start in starts:
            results[start] = study(folders[start : start + MAX_LAG + 1], prompts)
            report(start, results[start])
    rows = [row for result in results.values() for row in result["lags"]]
    for part in PARTS:
        print(f"{part}: {verdict([row[part] for row in rows])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.figure:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
