"""Live runs with environments of several turns: one start of the workers for all schedules."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace import clock
from tailrace.api import load_config, train
from tailrace.commands.live import advantages_of, check_live, open_parts, rewind
from tailrace.config import RunConfig
from tailrace.controller.execution import execute
from tailrace.data.tokenizer import load_tokenizer, text_of
from tailrace.record.events import BooksClosed, Event, Recorder, Stepped
from tailrace.schedules import SCHEDULES
from tailrace.types import Sample

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "tools" / "model"
ENVIRONMENT = '''
import re

from tailrace.environments.base import Outcome

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

class Silent:
    async def run(self, prompt, policy):
        await policy.complete()
        return Outcome()
'''
SCHEDULES_TESTED = {
    "serial": {"groups_per_round": 4, "groups_per_step": 2},
    "rolloutpipe": {"groups_per_round": 4, "groups_per_step": 2},
    "april": {"groups_per_round": 4, "groups_launched": 8},
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


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The example, with an environment that always has two turns; steps too small to change a log-prob."""
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    changes = {
        "run.rounds": 2,
        "run.group_size": 4,
        "run.eval_every": 0,
        "environment": f'{{ kind = "python", environment = "{tmp_path}/twice.py:Twice", arguments = {{ right = 1.0 }} }}',
        "trainer.learning_rate": 1e-12,
    }
    return load_config(EXAMPLES / "tools.toml", changes)


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
    config: RunConfig, tmp_path: Path
) -> None:
    check_live(config)
    steps = {name: Steps() for name in SCHEDULES_TESTED}

    async def run() -> None:
        async with open_parts(config, tmp_path) as parts:
            await parts.trainer.save(tmp_path / "start")
            for name, parameters in SCHEDULES_TESTED.items():
                await rewind(parts, tmp_path / "start", version=0)
                schedule = partial(SCHEDULES[name], **parameters)
                recorder = Recorder(steps[name])
                await execute(schedule, parts, config.run, recorder, compute_advantages=advantages_of(config))

    clock.run(run(), virtual=False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    text = text_of(load_tokenizer(MODEL))
    with torch.no_grad():
        for name, found in steps.items():
            assert found.closed, name
            assert len(found.samples) >= 32, name
            for sample in found.samples:
                assert len(sample.turns) == 2 and sample.reward is not None
                assert sample.behavior_logprobs == pytest.approx(recomputed(model, sample), abs=1e-4), name
                (product,) = sample.turns[0].results
                shown = text(sample.turns[0].observation_ids)
                assert shown == f"\nuser\n<tool_response>\n{product}\n</tool_response>\nassistant\n"


def test_a_run_with_tools_records_turns_calls_and_messages(tmp_path: Path) -> None:
    changes = {
        "run.rounds": 2,
        "run.eval_every": 0,
        "schedule.groups_per_round": 16,
        "schedule.groups_launched": 16,
    }
    config = load_config(EXAMPLES / "tools.toml", changes)
    train(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert all(row["rewards/environment/turns"] == row["num_turns/mean"] >= 1 for row in steps)
    assert {"rewards/environment/malformed", "rewards/environment/timeout"} <= steps[0].keys()
    lines = (tmp_path / "run" / "samples" / "round_000001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    right = [sample for sample in samples if sample["reward"] == 1.0]
    assert right  # one response in twenty uses the tool before the first step
    for sample in right:
        call, answer, last = sample["messages"]
        assert call["content"].startswith('<tool_call>\n{"name": "calculator"')
        assert answer == {"role": "tool", "name": "calculator", "content": last["content"]}
        assert sample["prompt"].startswith("<|im_start|>system\nTools: calculator<|im_end|>\n")
