"""The model card of a run: what was trained, how, and how well, from the files of the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tailrace import __version__
from tailrace.config import RunConfig
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.commands.intervals import recorded_estimate
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, read_checksums
from tailrace.errors import ConfigError
from tailrace.model_folder import is_hub_id
from tailrace.record.events import Row
from tailrace.record.figures import steps_of
from tailrace.record.metrics import read_rows


class _Totals(msgspec.Struct):
    """The part of summary.json that a card has."""

    steps: int
    tokens: dict[str, int | dict[str, int]]


def card_of(folder: RunFolder, repo: str) -> ModelCard:
    """Return the card of the model of a run. Raises a ConfigError if the run has not ended."""
    config, is_sft, rows = folder.read_config(), folder.command == "sft", read_rows(folder.metrics)
    try:
        if is_sft and not folder.summary.exists() and (steps := steps_of(rows)):  # an earlier release's
            tokens = sum(int(row["tokens/trained"]) for row in steps)
            summary = _Totals(int(steps[-1]["step"]), {"trained": tokens})
        else:
            summary = msgspec.json.decode(folder.summary.read_bytes(), type=_Totals)
    except (OSError, ValueError, RecursionError) as why:
        problem = f"the run has not ended: {folder.summary} cannot be read ({why})"
        remedy = f"go on with tailrace {'sft' if is_sft else 'train'} --resume"
        raise ConfigError("RUN", str(folder.path), problem, remedy) from why
    step = _step_of_model(folder, summary.steps)
    figure = "loss" if is_sft else "reward"
    learnt = "fine-tuned on given responses" if is_sft else "post-trained by reinforcement learning"
    evaluated = [row for row in rows if f"eval/{figure}" in row and row["step"] <= step]
    shared = config.shared()
    base = shared.get("model", {}).get("path", "unknown")
    data = ModelCardData(
        base_model=base if is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tailrace", *(["sft"] if is_sft else ["reinforcement-learning", config.algorithm.name])],
        model_name=repo.rpartition("/")[2],
        eval_results=[_eval_result(config, figure, evaluated[-1])] if evaluated else None,
    )
    num_samples = sum(int(row.get("samples/trained", 0)) for row in rows if row["step"] <= step)
    facts = {
        "base model": base,
        **({} if is_sft else {"schedule": shared["schedule"].get("name", "one of its own")}),
        "algorithm": "cross-entropy" if is_sft else config.algorithm.name,
        "data": _data_name(config),
        "optimizer steps": f"{step:,}",
        "trained samples": f"{num_samples:,}",
        f"held-out {figure}": _held_out(folder, config, evaluated[-1]) if evaluated else "not evaluated",
        **{f"tokens {fate}": f"{n:,}" for fate, n in _fates(summary.tokens)},
        "tailrace": __version__,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {data.model_name}\n\n"
        f"A language model {learnt} with tailrace.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Config\n\n```toml\n{tomli_w.dumps(shared)}```\n"
    )


def _step_of_model(folder: RunFolder, last: int) -> int:
    """The optimizer steps of the exported model."""
    sealed = folder.model / CHECKSUMS_FILE
    return read_checksums(sealed).step if sealed.exists() else last


def _fates(tokens: dict[str, int | dict[str, int]]) -> Iterator[tuple[str, int]]:
    for fate, value in tokens.items():
        counts = value if isinstance(value, dict) else {"": value}
        yield from ((f"{fate} {reason}".strip(), count) for reason, count in counts.items())


def _held_out(folder: RunFolder, config: RunConfig, row: Row) -> str:
    if "eval/loss" in row:
        return f"{row['eval/loss']:.4f} nats a token (at step {row['step']:.0f})"
    reward = f"{row['eval/reward']:.3f}"
    how = f"{'greedy' if config.run.eval_greedy else 'sampled'}, at step {row['step']:.0f}"
    if (estimate := recorded_estimate(folder.samples, row["round"])) is None:
        return f"{reward} ({how})"
    return f"{reward}, {estimate} ({estimate.num_prompts} prompts, {how})"


def _eval_result(config: RunConfig, figure: str, row: Row) -> EvalResult:
    name = _data_name(config)
    return EvalResult(
        task_type="text-generation",
        dataset_type=name,
        dataset_name=f"{name}, held out",
        metric_type=figure,
        metric_value=round(row[f"eval/{figure}"], 4),
    )


def _data_name(config: RunConfig) -> str:
    """The kind of the data, and their task or the name of their file."""
    data: Any = config.data
    if data is None:
        return "none"
    named = next((getattr(data, key) for key in ("task", "path", "taskset") if getattr(data, key, None)), "")
    return f"{data.kind}: {Path(str(named)).name}" if named else str(data.kind)
