"""A step of each framework and mode, with the names of its source, and what we read in it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, float]
SAMPLES, MEAN, LONGEST, PROMPT = 512, 1200.0, 8000.0, 150.0
TOKENS = SAMPLES * (MEAN + PROMPT)


@dataclass(frozen=True)
class ModeLog:
    """Args:
    rows: of one step, in the order in which they are logged.
    overlaps: engines generate while it trains.
    expected: some of our figures.
    """

    rows: tuple[Row, ...]
    overlaps: bool
    expected: Row


def _verl(step: float, gen: float, lag: float, **more: float) -> tuple[Row, ...]:
    row = {
        "timing_s/step": step,
        "timing_s/gen": gen,
        "timing_s/old_log_prob": 9,
        "timing_s/update_actor": 46,
    }
    row |= {"timing_s/reward": 0.5, "timing_s/update_weights": 3, "timing_s/adv": 0.2}
    row |= {"response_length/mean": MEAN, "response_length/max": LONGEST, "response_length/clip_ratio": 0.02}
    row |= {"prompt_length/mean": PROMPT, "perf/total_num_tokens": TOKENS, "perf/time_per_step": step}
    row |= {"perf/throughput": TOKENS / step / 24}
    stale = "training/off_policy/trajectory_staleness_worst"
    return (row | {f"{stale}/mean": lag / 2, f"{stale}/max": lag, f"{stale}/min": 0} | more,)


def _skyrl(waits: Row) -> tuple[Row, ...]:
    """The metrics of a step, then its times."""
    of = {"avg": MEAN, "std": 1500, "max": LONGEST, "min": 9}
    metrics = {f"generate/{name}_num_tokens": value for name, value in of.items()}
    metrics |= {"generate/batch_num_seq": SAMPLES, "trainer/epoch": 0}
    times = {
        "timing/step": 90.0,
        "timing/fwd_logprobs_values_reward": 8,
        "timing/train_critic_and_policy": 40,
    }
    return metrics, times | {"timing/sync_weights": 2, "timing/convert_to_training_input": 1} | waits


def _tinker(spans: Row) -> tuple[Row, ...]:
    row = {"env/all/total_episodes": SAMPLES, "env/all/total_ac_tokens": SAMPLES * MEAN, "time/total": 100.0}
    row |= {"env/all/total_ob_tokens": SAMPLES * PROMPT, "time/train_step": 50}
    return (row | {"time/save_checkpoint_and_get_sampling_client": 5} | spans,)


def _openrlhf(step: float, generation: float) -> tuple[Row, ...]:
    row = {"timing/step_total": step, "timing/generation": generation, "timing/make_experience": 10}
    row |= {"timing/ppo_train": 40, "timing/broadcast": 4, "rollout/num_samples": SAMPLES}
    row |= {"rollout/response_length_mean": MEAN, "rollout/truncated_rate": 0.02}
    return ({f"train/{name}": value for name, value in row.items()},)


def _areal(lag: float) -> tuple[Row, ...]:
    times = {"rollout": 20.0, "train_step": 50, "recompute_logp": 9, "update_weights": 3, "save": 0.1}
    row = {f"timeperf/{name}": value for name, value in times.items()}
    row |= {"ppo_actor/n_seqs": SAMPLES, "ppo_actor/no_eos_ratios/avg": 0.02}
    row |= {"ppo_actor/seq_len/avg": MEAN + PROMPT, "ppo_actor/seq_len/max": LONGEST + PROMPT}
    row |= {"ppo_actor/prompt_len/avg": PROMPT}
    ages = {"avg": lag / 2, "max": lag}
    stale = "ppo_actor/update/version_stats/sample_staleness_theta"
    return (row | {f"{stale}_{name}": value for name, value in ages.items()},)


def _nemo(waits: Row) -> tuple[Row, ...]:
    times = {"total_step_time": 90.0, "policy_training": 40, "policy_and_reference_logprobs": 9} | waits
    row = {f"timing/train/{name}": value for name, value in times.items()}
    train = {"mean_gen_tokens_per_sample": MEAN, "gen_tokens_per_sample/max": LONGEST}
    train |= {"mean_prompt_length": PROMPT, "total_num_tokens": TOKENS}
    return (row | {f"train/{name}": value for name, value in train.items()},)


def _slime(rollout: float, wait: float) -> tuple[Row, ...]:
    lengths = {"mean": MEAN, "median": 700, "max": LONGEST}
    row = {f"rollout/response_len/{name}": value for name, value in lengths.items()}
    row |= {"perf/rollout_time": rollout, "perf/train_wait_time": wait, "perf/train_time": 45.0}
    return (row | {"perf/step_time": wait + 45, "perf/update_weights_time": 2},)


def _roll(steps: Row) -> tuple[Row, ...]:
    row = {"time/step_total": 100.0, "time/step_train": 40, "time/step_model_update": 3}
    row |= {f"token/response_length/{name}": value for name, value in {"mean": MEAN, "max": LONGEST}.items()}
    return (row | {"token/prompt_length/mean": PROMPT} | steps,)


_PRIME = {
    f"train/agg/effective/num_output_tokens/{name}": v for name, v in {"mean": MEAN, "max": LONGEST}.items()
}
_PRIME |= {"train/agg/effective/num_input_tokens/mean": PROMPT, "progress/rollouts": SAMPLES}
_PRIME |= {"off_policy/mean": 2, "off_policy/max": 5}
_TRL = {"completions/mean_length": MEAN, "completions/max_length": LONGEST, "completions/clipped_ratio": 0.02}
_ASYNC = {"perf/step_s": 60.0, "perf/rollout_wait_s": 6, "perf/fwd_bwd_s": 44, "perf/optimizer_s": 2}
_ASYNC |= {"perf/weight_sync_s": 3, "batch/samples_per_step": SAMPLES, "sample/staleness_mean": 1.5}
_ASYNC |= {
    "sample/staleness_max": 4,
    "sample/dropped_stale_total": 3,
    "batch/forwarded_tokens_per_step": TOKENS,
}
_WAITED, _GENERATED = "timing/wait_for_generation_buffer", "timing/generate"

MODES = {
    "verl sync": ModeLog(_verl(120, 60, 0), False, {"generation_s": 60, "lag_max": 0, "devices": 24}),
    "verl colocate_async": ModeLog(
        _verl(90, 30, 1, **{"training/off_policy/evicted_samples": 2}),
        True,
        {"wait_s": 30, "lag_max": 1, "lag_mean": 0.5, "discarded": 2},
    ),
    "verl separate_async": ModeLog(_verl(64.8, 2.8, 3), True, {"wait_s": 2.8, "lag_max": 3, "samples": 512}),
    "verl separate_async, lent": ModeLog(
        _verl(70, 5, 0, **{"timing_s/switch_wait": 4, "separate_async/switch/threshold_ratio": 0.4}),
        True,
        {"wait_s": 5},
    ),
    "verl fully_async": ModeLog(
        _verl(70, 5, 0, **{"fully_async/count/current_param_version": 7}), True, {"wait_s": 5}
    ),
    "verl one_step_off": ModeLog(
        _verl(70, 5, 0, **{"timing_s/sync_rollout_weights": 1}), True, {"wait_s": 5}
    ),
    "TRL": ModeLog(
        ({"step_time": 100.0, "num_tokens": TOKENS, "reward": 0.5} | _TRL,), False, {"step_s": 100}
    ),
    "TRL async": ModeLog(
        (_ASYNC | _TRL,),
        True,
        {"wait_s": 6, "update_s": 46, "lag_mean": 1.5, "lag_max": 4, "discarded": 3, "samples": 512},
    ),
    "SkyRL sync": ModeLog(_skyrl({_GENERATED: 35}), False, {"generation_s": 35, "std_tokens": 1500}),
    "SkyRL fully async": ModeLog(
        _skyrl({_WAITED: 30, "async/staleness_mean": 1.1, "async/staleness_max": 4}),
        True,
        {"wait_s": 30, "lag_mean": 1.1, "lag_max": 4, "samples": 512},
    ),
    "tinker-cookbook sync": ModeLog(
        _tinker({"time/sampling": 44}), False, {"generation_s": 44, "prompt_tokens": PROMPT}
    ),
    "tinker-cookbook async": ModeLog(
        _tinker({"async/staleness_mean": 0.97, "async/staleness_max": 2}), True, {"wait_s": 45, "lag_max": 2}
    ),
    "OpenRLHF sync": ModeLog(_openrlhf(120, 66), False, {"generation_s": 66, "update_s": 50}),
    "OpenRLHF async": ModeLog(_openrlhf(80, 76), True, {"wait_s": 26, "update_s": 50}),
    "AReaL sync": ModeLog(_areal(0), False, {"generation_s": 20, "mean_tokens": MEAN}),
    "AReaL async": ModeLog(_areal(4), True, {"wait_s": 20, "lag_mean": 2, "max_tokens": LONGEST}),
    "NeMo-RL sync": ModeLog(
        _nemo({"generation": 35, "prepare_for_generation/total": 2}), False, {"sync_s": 2}
    ),
    "NeMo-RL async": ModeLog(
        (
            *_nemo({"exposed_generation": 30, "weight_sync": 2}),
            {"efficiency/idle/buffer_starvation_s": 28, "efficiency/idle/buffer_full_backoff_s": 6},
            {"train/avg_trajectory_age": 1.5},
        ),
        True,
        {"wait_s": 28, "held_s": 6, "lag_mean": 1.5},
    ),
    "prime-rl": ModeLog(
        (
            _PRIME | {"time/wait_for_policy": 4, "off_policy/dropped": 8},
            {"time/wait_for_batch": 12, "time/forward_backward": 50, "time/broadcast_weights": 2},
        ),
        True,
        {"wait_s": 12, "held_s": 4, "lag_mean": 2, "lag_max": 5, "discarded": 8},
    ),
    "slime sync": ModeLog(_slime(50, 55), False, {"generation_s": 50, "median_tokens": 700}),
    "miles async": ModeLog(_slime(80, 35), True, {"wait_s": 35}),
    "ROLL rlvr": ModeLog(_roll({"time/step_generate": 50}), False, {"generation_s": 50}),
    "ROLL agentic": ModeLog(_roll({"time/step_rollout": 50}), False, {"generation_s": 50}),
}
UNSAID = {"samples": SAMPLES, "max_tokens": LONGEST}
"""What some of them do not say, as flags."""


def rows_of(name: str, num_steps: int) -> Iterator[Row]:
    """The rows of a log of so many equal steps."""
    for step in range(1, num_steps + 1):
        for row in MODES[name].rows:
            counts = {"system/samples": float(step * SAMPLES)} if name.startswith("ROLL") else {}
            counts |= {"num_tokens": step * row["num_tokens"]} if "num_tokens" in row else {}
            yield {"step": step, **row, **counts}


def written(name: str, folder: Path, num_steps: int = 4) -> Path:
    """Write a log of JSONL."""
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name, num_steps)), encoding="utf-8")
    return file
