"""`tailrace init`: a commented config and a reward function that fit a machine."""

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from itertools import product
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Any

from tailrace.config import config_of
from tailrace.contracts.memory import ModelShape
from tailrace.drivers.commands.tables import writing
from tailrace.drivers.data.rows import open_table
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.reward.calls import OWN_ARGUMENTS
from tailrace.errors import ConfigError
from tailrace.extras.plan.planned import changes_of, on_cluster
from tailrace.model_folder import find_folder, is_hub_id
from tailrace.rollout.placement import Kind
from tailrace.sim.cluster import MODELS, rates
from tailrace.sim.device_profiles import PROFILES
from tailrace.sim.settings import SimClusterSettings, SimLengthSettings, SimSettings

GPUS = {name.replace(" ", "").lower(): name for name in PROFILES if name != "CPU"}
DIVISIONS: Mapping[int, tuple[int | None, ...]] = {1: (None,), 2: (1, None), 4: (2, None), 8: (4, None)}
"""For the GPUs of one node: how many of them generate. None: all generate and train in turn. The first is
taken on which the model fits, with all weights trained or else with an adapter."""
STATES: Mapping[float, Mapping[str, Any]] = {16.0: {}, 4.5: {"rank": 16}}
"""The trainer's bytes for each parameter (`sim.cluster.trainer_bytes_per_parameter`), and [trainer.lora]."""
SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes of the engines, in the order in which they are tried."""
PROMPTS, ANSWERS = ("prompt", "question", "problem", "messages"), ("answer", "solution", "ground_truth")
"""Usual columns of the prompt and of the right answer."""
COMMENTS = {
    "name": "docs/reference/schedules.md has the others",
    "groups_per_step": "prompts of an optimizer step",
    "staleness": "updates for which a token may wait until it is trained, at most",
    "args": "engines give their memory back while the trainer works",
    "ranks": "processes over which the model is sharded (FSDP2)",
    "tensor_parallel": "processes that divide each layer",
    "learning_rate": "if rewards fall, lower it",
    "max_num_seqs": "requests that one engine decodes together, at most",
    "rank": "of the adapter; pip install 'tailrace[lora]'",
    "rollout_devices": "the others train",
}
"""The meaning of keys that depend on the machine."""
COLUMN = 36
"""Where comments begin, at least."""
_value = partial(json.dumps, ensure_ascii=False)
"""Writes a number, a text or a list of them, which TOML has as JSON has, but for surrogate pairs."""


def init(
    *,
    model: str,
    data: Path,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    gpus: str | None = None,
    folder: Path = Path(),
) -> None:
    """Write run.toml and rewards.py. Nothing is overwritten.

    Args:
        model: a Hugging Face folder, or the id of a model on the hub.
        data: a JSONL file, a parquet file or a dataset folder: rows with a prompt and the right answer.
        prompt_column: of a text, or of a list of chat messages; by default the first of prompt, question,
            problem and messages.
        answer_column: by default the first of answer, solution and ground_truth. The reward names it.
        gpus: the GPUs of one node, such as 8xH100. Without them the run is for the CPU of a laptop.
        folder: of both files.
    """
    prompt, answer = _columns(data, prompt_column, answer_column)
    known = model.rpartition("/")[2].removesuffix("-Instruct")
    is_known = known in MODELS and is_hub_id(model)
    known = known if is_known else str(find_folder(Path(model)))
    context = (MODELS[known] if is_known else ModelShape.read(Path(known))).context_tokens
    tokens = min(256 if gpus is None else 2048, context // 2)
    lengths = {"prompt_tokens": min(1024, context // 2), "max_tokens": tokens}
    sections = _on_a_laptop() if gpus is None else _on_gpus(_divided(gpus, known, tokens), folder, lengths)
    values = {
        "machine": f"For {gpus}" if gpus else "For the CPU of a laptop",
        "forecast": ", `tailrace simulate run.toml` how long\n# rounds take, and" if gpus else ", and\n#",
        "rounds": 200 if gpus else 20,
        "schedule": _toml({"schedule": sections.pop("schedule")}),
        "model": _value(_from(folder, model)),
        "data": _value(_from(folder, str(data))),
        "prompt": _value(prompt),
        "prompt_tokens": lengths["prompt_tokens"],
        "tokens": tokens,
        "sections": _toml(sections),
        "answer": answer,
    }
    texts = {"run.toml": "run.toml", "rewards.py": "rewards.py.txt"}
    for name in texts:
        if os.path.lexists(folder / name):
            remedy = "name another --folder, or move it away"
            raise ConfigError("--folder", str(folder), f"it has a {name} already", remedy)
    with writing("--folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in texts.items():
            text = Template((Path(__file__).parent / template).read_text(encoding="utf-8")).substitute(values)
            text = re.sub(r"^(\w.*?)  # ", lambda found: f"{found[1]:{COLUMN}}# ", text, flags=re.MULTILINE)
            (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote     {folder / 'run.toml'}, {folder / 'rewards.py'}")
    print(f"next      tailrace train {folder / 'run.toml'} --output-dir runs/first --dry-run")


def _columns(data: Path, prompt: str | None, answer: str | None) -> tuple[str, str]:
    """The columns of the prompt and of the right answer. Raises as `open_table`, or a ConfigError."""
    columns = open_table(RowsSettings(path=data.absolute()), "train")[0][0]
    found: list[str] = []
    for given, names, option in ((prompt, PROMPTS, "--prompt-column"), (answer, ANSWERS, "--answer-column")):
        name = next((name for name in ([given] if given else names) if name in columns), None)
        if name is None:
            problem = f"no column of the first row is {given or ', '.join(names)}"
            raise ConfigError(option, given, problem, f"choose from {', '.join(columns)}")
        found.append(name)
    if not found[1].isidentifier() or iskeyword(found[1]) or found[1] in OWN_ARGUMENTS:
        problem, remedy = "no parameter of the reward function can have this name", "rename the column"
        raise ConfigError("--answer-column", found[1], problem, remedy)
    return found[0], found[1]


def _divided(gpus: str, model: str, max_tokens: int) -> SimClusterSettings:
    """The GPUs of a node, with the first division on which the model fits. Raises a ConfigError."""
    ((count, name),) = re.findall(r"^(?:(\d{1,4})\s*x)?\s*(.*)", gpus)
    num, device = int(count or 1), GPUS.get(name.replace(" ", "").lower())
    if device is None or num not in DIVISIONS:
        counts, known = ", ".join(map(str, DIVISIONS)), ", ".join(GPUS.values())
        problem = "the GPU is not known" if device is None else f"there are presets for {counts} of them"
        raise ConfigError("--gpus", gpus, problem, f"write a number ({counts}), x and a GPU ({known})")
    for state, rollout, size in product(STATES, DIVISIONS[num], SIZES):
        cluster = SimClusterSettings(
            device=device,
            devices=num,
            model=model,
            rollout_devices=rollout,
            tensor_parallel=size,
            trainer_bytes_per_parameter=state,
        )
        try:
            rates(SimSettings(cluster=cluster, lengths=SimLengthSettings(max_tokens=max_tokens)))
            return cluster
        except ConfigError as why:
            problem = f"the model does not fit ({why.problem})"
    raise ConfigError("--gpus", gpus, problem, "name more or larger GPUs, or a smaller model")


def _on_gpus(
    cluster: SimClusterSettings, folder: Path, lengths: Mapping[str, int]
) -> dict[str, Mapping[str, Any]]:
    """The sections that depend on the machine, relative to a folder. `lengths`: of [sim.lengths]."""
    groups, least = max(16, 8 * cluster.devices), {"run": {"rounds": 1, "group_size": 2}}
    schedule: dict[str, Any] = {"name": "serial", "groups_per_round": groups, "groups_per_step": groups}
    kind: Kind = "colocated"
    if cluster.rollout_devices:
        kind, schedule = "disaggregated", {"name": "tailrace", "groups_per_step": groups}
        schedule |= {"groups_in_flight": 2 * groups, "staleness": 1}
    named = {"device": cluster.device, "devices": cluster.devices, "model": _from(folder, str(cluster.model))}
    devices = {**named, **cluster.model_dump(exclude_defaults=True, exclude={"model"})}
    lora = STATES[cluster.trainer_bytes_per_parameter]
    tree = {**least, "schedule": schedule, "sim": {"cluster": devices, "lengths": lengths}}
    tree |= {"trainer": {"lora": lora}} if lora else {}
    made = changes_of(config_of({**tree, **on_cluster(config_of(tree), cluster, kind)}))
    sections: dict[str, Mapping[str, Any]] = {
        "schedule": schedule,
        "engine": {**made["engine"], "max_num_seqs": 256},
        "placement": made["placement"],
        "trainer": {"learning_rate": 1e-5 if lora else 1e-6, **made["trainer"]},
        "trainer.lora": lora,
        "sim.cluster": devices,
    }
    return {name: section for name, section in sections.items() if section}


def _on_a_laptop() -> dict[str, Mapping[str, Any]]:
    schedule = {"name": "rolloutpipe", "groups_per_round": 8, "groups_per_step": 4}
    return {"schedule": schedule, "engine": {"max_num_seqs": 32}, "trainer": {"learning_rate": 1e-6}}


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        for key, value in section.items():
            comment = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
            lines.append(f"{key} = {_value(value)}{comment}")
        lines.append("")
    return "\n".join(lines)


def _from(folder: Path, name: str) -> str:
    """The path from a folder to a file, or the id of a model on the hub."""
    return os.path.relpath(name, folder.resolve()) if Path(name).exists() else name
