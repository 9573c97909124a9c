"""Live runs with environments of several turns: one start of the workers for all schedules."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace import clock
from tailrace.api import load_config
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.environments import (
    calls_reward_functions,
    open_episodes,
    training_prompts,
    unused_rewards,
)
from tailrace.drivers.assembly.open import open_parts
from tailrace.drivers.assembly.resumption import rewind
from tailrace.drivers.data.encoding import load_tokenizer, text_of
from tailrace.errors import ConfigError
from tailrace.record.events import BooksClosed, Event, Recorder, Stepped
from tailrace.record.metrics import MetricsWriter
from tailrace.record.samples import SamplesWriter
from tailrace.record.steps import StepMeter
from tailrace.schedules import SCHEDULES
from tailrace.types import Sample

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "tools.toml"
MODEL = EXAMPLES / "tools" / "model"
ENVIRONMENT = '''
import re

from tailrace.contracts.environments import Outcome

class Twice:
    """The policy is told the product, whatever it said, and asked again."""

    def __init__(self, right: float) -> None:
        self.right = right

    async def run(self, prompt, policy):
        a, b = map(int, re.findall(r"\\d+", prompt.row["question"]))

        async def product() -> str:
            return str(a * b)

        await policy.complete()
        answer = await policy.call(product)
        last = await policy.complete([{"role": "tool", "content": answer}])
        return Outcome(self.right * (last.text == answer) + 0.01 * last.num_tokens)
'''
SCHEDULES_TESTED: dict[str, dict[str, int]] = {
    "serial": {"groups_per_round": 4, "groups_per_step": 2},
    "rolloutpipe": {"groups_per_round": 4, "groups_per_step": 2},
    "april": {"groups_per_round": 4, "groups_launched": 8},
    "april_dapo": {"groups_per_round": 4, "groups_per_draw": 8},
    "tailbatch": {"groups_per_round": 4},
    "pipelinerl": {"groups_per_step": 4, "in_flight_per_engine": 16, "ring_groups": 8},
    "tailrace": {"groups_per_step": 4, "groups_in_flight": 8, "staleness": 2},
}


class Steps:
    """Sink: the trained samples, and whether the books closed."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.closed = False

    def on(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.samples += event.samples
        self.closed |= isinstance(event, BooksClosed)

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class Played:
    """What the runs of one start did."""

    steps: dict[str, Steps]
    """Of each schedule, with an environment that always has two turns."""
    folder: Path
    """Records of a run with tools."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Steps are too small to change a log-prob, so those of every version can be compared with one model."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "twice.py").write_text(ENVIRONMENT)
    spec = f'kind = "python", environment = "{folder}/twice.py:Twice", arguments = {{ right = 1.0 }}'
    changes = {"run.rounds": 2, "run.group_size": 4, "run.eval_every": 0, "trainer.learning_rate": 1e-12}
    tools = load_config(EXAMPLE, changes)
    twice = load_config(EXAMPLE, changes | {"environment": f"{{ {spec} }}"})
    played = Played({name: Steps() for name in SCHEDULES_TESTED}, folder)
    (folder / "samples").mkdir()
    writers = MetricsWriter(folder / "metrics.jsonl"), SamplesWriter(folder / "samples")

    async def run() -> None:
        async with open_parts(tools, folder) as parts:
            await (await parts.trainer.save(folder / "start"))
            settings = tools.run.model_copy(update={"rounds": 1, "group_size": 8})
            meter = StepMeter(*writers, wall_clock=lambda: 0.0)
            serial = partial(SCHEDULES["serial"], groups_per_round=16, groups_per_step=16)
            await execute(serial, parts, settings, Recorder(meter))
            async with open_episodes(twice, load_tokenizer(MODEL), None) as run_episode:
                for name, parameters in SCHEDULES_TESTED.items():
                    await rewind(parts, folder / "start", version=0)
                    schedule = partial(SCHEDULES[name], **parameters)
                    recorder = Recorder(played.steps[name])
                    await execute(schedule, replace(parts, run_episode=run_episode), twice.run, recorder)

    check_live(tools)
    check_live(twice)
    clock.run(run(), virtual=False)
    return played


def recomputed(model: Any, sample: Sample) -> list[float]:
    """The log-prob of each token of the policy, in one pass over the whole episode."""
    ids = torch.tensor([[*sample.prompt.ids, *sample.response_ids]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    place, start, found = len(sample.prompt.ids), 0, []
    for turn in sample.turns:
        for id in sample.completion_ids[start : turn.num_tokens]:
            assert ids[0, place] == id
            found.append(float(logprobs[place - 1, id]))
            place += 1
        start, place = turn.num_tokens, place + len(turn.observation_ids)
    return found


def test_every_schedule_trains_episodes_whose_log_probs_are_those_of_the_whole_context(
    played: Played,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    text = text_of(load_tokenizer(MODEL))
    with torch.no_grad():
        for name, found in played.steps.items():
            assert found.closed, name
            assert len(found.samples) >= 32, name
            for sample in found.samples:
                assert len(sample.turns) == 2 and sample.reward is not None
                (product,) = sample.turns[0].results
                shown = text(sample.turns[0].observation_ids)
                assert shown == f"\nuser\n<tool_response>\n{product}\n</tool_response>\nassistant\n"
            for sample in found.samples[::4]:
                assert sample.behavior_logprobs == pytest.approx(recomputed(model, sample), abs=1e-4), name


def test_a_run_with_tools_records_turns_calls_and_messages(played: Played) -> None:
    rows = [json.loads(line) for line in (played.folder / "metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "loss" in row)
    assert step["rewards/environment/turns"] == step["num_turns/mean"] > 1
    assert {"rewards/environment/malformed", "rewards/environment/timeout"} <= step.keys()
    lines = (played.folder / "samples" / "round_000000.jsonl").read_text().splitlines()
    right = [sample for line in lines if (sample := json.loads(line))["reward"] == 1.0]
    assert right  # one response in twenty uses the tool before the first step
    for sample in right:
        call, answer, last = sample["messages"]
        assert call["content"].startswith('<tool_call>\n{"name": "calculator"')
        assert answer == {"role": "tool", "name": "calculator", "content": last["content"]}
        assert sample["prompt"].startswith("<|im_start|>system\nTools: calculator<|im_end|>\n")


def without_tools(folder: Path) -> Path:
    """The example's model with a chat template that has no branch for tools, as SmolLM2's."""
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return folder / "model"


def test_tools_that_the_chat_template_leaves_out_are_refused(tmp_path: Path) -> None:
    changes: dict[str, object] = {"model.path": without_tools(tmp_path)}
    with pytest.raises(ConfigError) as error:
        check_live(load_config(EXAMPLE, changes))
    assert error.value.key == "environment.functions"
    assert "leaves tools out" in str(error.value)
    assert "set data.tools_in_system_prompt = true" in str(error.value)


def test_tools_in_the_system_prompt_reach_a_template_that_has_none(tmp_path: Path) -> None:
    changes: dict[str, object] = {"model.path": without_tools(tmp_path), "data.tools_in_system_prompt": True}
    config = load_config(EXAMPLE, changes)
    check_live(config)
    prompt = training_prompts(config)[0]
    assert prompt.text.startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "calculator"' in prompt.text and "<tool_call>" in prompt.text
    with pytest.raises(ConfigError, match=r"environment\.parser = 'llama3_json'"):
        check_live(load_config(EXAMPLE, changes | {"environment.parser": "llama3_json"}))


@pytest.mark.skipif("TAILRACE_SMOLLM2" not in os.environ, reason="TAILRACE_SMOLLM2 names no model folder")
def test_smollm2_gets_a_calculator_described_or_is_refused() -> None:
    changes: dict[str, object] = {"model.path": os.environ["TAILRACE_SMOLLM2"]}
    with pytest.raises(ConfigError, match="leaves tools out"):
        check_live(load_config(EXAMPLE, changes))
    described = changes | {"data.tools_in_system_prompt": True, "run.group_size": 2}
    text = training_prompts(load_config(EXAMPLE, described))[0].text
    assert '"name": "calculator"' in text.partition("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            'kind = "verifiers", taskset = "any"',
            "not used: reward function exact_match and reward.code; the env",
        ),
        (
            'kind = "agent", function = "{folder}/agents.py:sure"',
            "not used, but for episodes that end because no",
        ),
        ('kind = "agent", function = "{folder}/agents.py:unsure"', ""),
        ('kind = "python", environment = "{folder}/agents.py:sure"', ""),
        ('kind = "single_turn"', ""),
    ],
)
def test_rewards_that_the_environment_makes_unused_are_named(
    environment: str, said: str, tmp_path: Path
) -> None:
    agents = "def sure(base_url) -> float: ...\ndef unsure(base_url) -> float | None: ...\n"
    (tmp_path / "agents.py").write_text(agents)
    given = {"environment": "{" + environment.replace("{folder}", str(tmp_path)) + "}"}
    given |= {"reward.function": "exact_match", "reward.code": "{}"}
    if "verifiers" in environment:
        given |= {"data": '{ kind = "verifiers", taskset = "any" }'}
    warning = unused_rewards(load_config(EXAMPLE, given))
    assert warning.startswith(said) if warning and said else warning is None and not said


def test_only_an_environment_that_gives_rewards_may_go_without_reward_functions(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    changes = {"data": f'{{ kind = "rows", path = "{tmp_path}/rows.jsonl" }}'}
    with pytest.raises(ConfigError, match=r"reward\.function"):
        check_live(load_config(EXAMPLE, changes))
    spec = f'kind = "python", environment = "{tmp_path}/twice.py:Twice", arguments = {{ right = 1 }}'
    config = load_config(EXAMPLE, changes | {"environment": f"{{ {spec} }}"})
    check_live(config)
    assert not calls_reward_functions(config)
