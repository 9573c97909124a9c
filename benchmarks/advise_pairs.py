"""What `tailrace advise` says of the synchronous runs that other projects printed beside an asynchronous one.

    python benchmarks/advise_pairs.py --json benchmarks/results/advise_pairs.json
    python docs/make_pairs.py docs/reference/pairs.md

Of each pair advise reads the synchronous half alone: a log with the printed seconds of a step and of its
parts, the printed number of samples and devices, and lengths of one law for all pairs, because no page prints
any (reproductions/peers.py). What it predicts for the framework's mode on the printed division of the devices
stands beside the asynchronous half. Nothing is fitted to that half. A pair that advise cannot answer is a row
with the reason.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from reproductions import peers, verl
from tailrace.errors import ConfigError
from tailrace.extras.plan.advise import MODES, Advice, BestOrder
from tailrace.extras.plan.candidates import response_lengths
from tailrace.extras.plan.peers import read_peer
from tailrace.sim.settings import SimSettings

STEPS = 4
"""Equal steps of a log; the first one is left out."""
COLOCATE, SEPARATE = (mode.name for mode in MODES["verl"])
PARTIAL = "verl, docs/advance/fully_async.md"
SAME_SIZE = "Qwen2.5-7B"
"""As large as Qwen2.5-Math-7B, whose published config ends at 4,096 tokens; the printed runs extend it."""
NO_FETCH = "no mode has fetches (require_batches)"
NOT_RUN = "its search has not been run: it takes some minutes of CPU"


@dataclass(frozen=True)
class Half:
    """The synchronous half of a pair, as verl logs it. `parts`: seconds by their names after timing_s/."""

    devices: int
    model: str
    groups: int
    size: int
    max_tokens: int
    step_s: float
    parts: Mapping[str, float]

    def write(self, file: Path) -> None:
        """Write its log."""
        lengths = {
            "median_tokens": peers.MEDIAN,
            "max_tokens": self.max_tokens,
            "prompt_tokens": peers.PROMPT,
        }
        law = SimSettings.model_validate({"lengths": lengths})
        drawn = [n for group in response_lengths(law, self.size, range(self.groups), 0) for n in group]
        row = {
            "timing_s/step": self.step_s,
            **{f"timing_s/{name}": seconds for name, seconds in self.parts.items()},
            "response_length/mean": fmean(drawn),
            "response_length/max": max(drawn),
            "response_length/clip_ratio": fmean(n == self.max_tokens for n in drawn),
            "prompt_length/mean": peers.PROMPT,
            "perf/total_num_tokens": sum(drawn) + len(drawn) * peers.PROMPT,
        }
        rows = [json.dumps({"step": step} | row) for step in range(1, STEPS + 1)]
        file.write_text("\n".join(rows) + "\n", encoding="utf-8")

    def orders(self, rollout_devices: int) -> Iterator[BestOrder]:
        """What advise predicts where so many devices generate and the others train."""
        with TemporaryDirectory() as scratch:
            self.write(file := Path(scratch) / "metrics.jsonl")
            advice = Advice.of(read_peer(file), self.size)
        cluster: dict[str, Any] = {"device": "H20", "devices": self.devices, "model": self.model}
        config = advice.config(cluster | {"tensor_parallel": 4}, None)
        assert config.sim.cluster
        divided = config.sim.cluster.changed(rollout_devices=rollout_devices)
        yield from advice.orders(
            config.model_copy(update={"sim": config.sim.changed(cluster=divided)}), print
        )


@dataclass(frozen=True)
class Printed:
    """The asynchronous half: devices that generate, and seconds of a step."""

    name: str
    source: str
    half: Half | None
    rollout_devices: int
    step_s: float
    why_not: str = ""


def _math_7b(devices: int) -> Half:
    step_s, gen_s, update_s = verl.SYNC[devices]
    limit = peers.FETCHING.max_tokens
    return Half(
        *(devices, SAME_SIZE, verl.GROUPS, verl.K, limit, step_s),
        {"gen": gen_s, "update_actor": update_s},
    )


def printed() -> Iterator[Printed]:
    """Yield the pairs of reproductions/peers.py and verl.py."""
    large = {"gen": 348.05, "old_log_prob": 28.73, "ref": 20.86, "update_actor": 86.27}
    yield Printed(
        *("verl, Qwen3-30B-A3B", PARTIAL),
        Half(128, "Qwen3-30B-A3B", 512, 16, 8192, peers.SYNC_30B, large),
        *(96, peers.LARGE_PRINTED["step"]),
    )
    small = {"gen": peers.SMALL.rollout_s, "update_actor": peers.SMALL.trainers[0].passes_s}
    yield Printed(
        *("verl, Qwen2.5-Math-7B, 16 H20", PARTIAL),
        Half(16, SAME_SIZE, 512, 16, 10_240, peers.SMALL_SYNC, small),
        *(8, peers.SMALL_PRINTED["step"]),
    )
    tools = {"gen": peers.RETOOL.rollout_s, "old_log_prob": 35.19, "update_actor": 111.84}
    yield Printed(
        *("verl, ReTool, Qwen2.5-7B", PARTIAL),
        Half(32, "Qwen2.5-7B", 64, 16, 16_384, peers.RETOOL_SYNC, tools),
        *(16, peers.RETOOL_PRINTED["step"]),
    )
    for row in verl.ASYNC:
        why = "" if row.staleness else "no mode is on separate devices without old tokens"
        name = f"verl, Qwen2.5-Math-7B, {row}"
        yield Printed(name, PARTIAL, _math_7b(2 * row.half), row.half, row.step, why)
    for steps, (step_s, _, _) in peers.FETCHES.items():
        name = f"verl, Qwen2.5-Math-7B, fetches of {steps * peers.FETCHING.mini}"
        yield Printed(name, PARTIAL, None, 64, step_s, NO_FETCH)
    for name, (_, figures, _) in peers.ONE_STEP.items():
        why = "no mode is the recipe one_step_off"
        source = "verl, docs/advance/one_step_off.md"
        yield Printed(f"verl, one step off, {name}", source, None, 4, figures["step"], why)
    for mode in verl.V1[1:]:
        source, why = "verl, docs/advance/v1_async_trainer.md", "no known model is Qwen3.5-35B-A3B"
        yield Printed(f"verl, {mode.name}, Qwen3.5-35B-A3B", source, None, 0, mode.step_s, why)
    why = "no framework of advise is vime, and no known device is an Ascend A3"
    yield Printed("vime", "vllm-project/vime, issue 358", None, 1, peers.VIME_PRINTED["step"], why)
    why = "no framework of advise is UniRL, which prints no parts of a step"
    seconds = peers.UNIRL_S["refilled"] / peers.ROLLOUTS
    yield Printed("UniRL", "Tencent-Hunyuan/UniRL, pull request 213", None, 0, seconds, why)


def rows(only: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair: those whose name has `only` last, as they are measured."""
    found: dict[tuple[float, int], Mapping[str, BestOrder]] = {}
    for pair in sorted(printed(), key=lambda pair: only in pair.name):
        row: dict[str, Any] = {"pair": pair.name, "source": pair.source, "printed_s": round(pair.step_s, 2)}
        if pair.half is None or pair.why_not or only not in pair.name:
            yield row | {"why_not": pair.why_not or NOT_RUN}
            continue
        key = (pair.half.step_s, pair.rollout_devices)
        try:
            if key not in found:
                found[key] = {each.mode.name: each for each in pair.half.orders(pair.rollout_devices)}
        except ConfigError as error:
            yield row | {"why_not": f"{error.key}: {error.problem}"}
            continue
        order = found[key][SEPARATE]
        yield row | {
            "synchronous_s": pair.half.step_s,
            "mode": SEPARATE,
            "devices": order.where,
            "predicted_s": round(order.step_s, 2),
            "lag_mean": round(order.measured.figures["lag_mean"], 2),
            "error": round(round(order.step_s, 2) / row["printed_s"] - 1, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, required=True, metavar="F", help="a file; measured rows are kept"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="pairs whose name has this")
    words = parser.parse_args()
    for row in rows(words.only):
        text = words.json.read_text(encoding="utf-8") if words.json.exists() else "[]"
        known = {each["pair"]: each for each in json.loads(text)}
        if row.get("why_not") == NOT_RUN and row["pair"] in known:
            continue
        known[row["pair"]] = row
        words.json.write_text(json.dumps([*known.values()], indent=1) + "\n", encoding="utf-8")
        print(row, flush=True)


if __name__ == "__main__":
    main()
