"""Tasksets of verifiers train, with the tasksets' own rewards and metrics."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import collected
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tailrace
from helpers.chatty_model import ANSWER, save_chatty_model
from tailrace.types import Sample

pytestmark = [
    pytest.mark.verifiers,
    # verifiers' client of tool servers calls tenacity by an old name.
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),
]

CONFIG = """
[run]
rounds = 5
group_size = 2

[schedule]
name = "rolloutpipe"
groups_per_round = 4
groups_per_step = 2

[model]
path = "model"

[environment]
kind = "verifiers"
{environment}

{data}

[sampling]
max_completion_tokens = 16

[engine]
dtype = "float32"

[trainer]
dtype = "float32"
learning_rate = 1e-4

[record]
sinks = ["collected:collector"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_chatty_model(folder)
    return folder


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An OpenAI-compatible model that says "three" and "three hundred" in turn."""
    replies = iter(["three", "three hundred"] * 1000)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": next(replies)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def train(model: Path, environment: str, data: str = "") -> list[tuple[Sample, ...]]:
    """Train ten steps; returns the samples of each."""
    config = model.parent / "run.toml"
    config.write_text(CONFIG.format(environment=environment, data=data))
    folder = model.parent / environment.split('"')[1]
    tailrace.train(tailrace.load_config(config), folder)
    steps = list(collected.STEPS)
    assert len(steps) == 10
    check_ids(model, [sample for samples in steps for sample in samples])
    return steps


def check_ids(model: Path, samples: Sequence[Sample]) -> None:
    """Recorded ids are what the engine produced: the model gives them the recorded log-probs, in the context
    of the whole episode."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    of_this_model = [sample for sample in samples if {span.version for span in sample.spans} == {0}]
    assert of_this_model
    for sample in of_this_model:
        ids = torch.tensor([*sample.prompt.ids, *sample.response_ids])
        places, place, start = [], len(sample.prompt.ids), 0
        for turn in sample.turns:
            num = turn.num_tokens - start
            places += range(place, place + num)
            place, start = place + num + len(turn.observation_ids), turn.num_tokens
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0].log_softmax(-1)
        found = logprobs[[each - 1 for each in places]].gather(1, ids[places][:, None])[:, 0]
        assert ids[places].tolist() == sample.completion_ids
        torch.testing.assert_close(found, torch.tensor(sample.behavior_logprobs), atol=1e-4, rtol=0)


def num_turns(sample: Sample) -> int:
    """Turns of the policy; the agent's first request stands before them as a turn without tokens."""
    return sum(turn.num_tokens > 0 for turn in sample.turns)


def test_reverse_text_trains(model: Path) -> None:
    steps = train(model, 'taskset = "reverse_text"\nargs = { num_words = 6 }')
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    samples = [sample for samples in steps for sample in samples]
    for sample in samples:
        text = tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
        assert sample.reward == sample.reward_metrics["environment/similarity"]
        assert (sample.reward > 0) == (ANSWER in text)
        assert sample.reward_metrics["environment/num_characters"] == len(text)
        assert num_turns(sample) == 1
    assert len({sample.reward for sample in samples}) > 2


def test_alphabet_sort_trains_over_several_turns(model: Path) -> None:
    steps = train(model, 'taskset = "alphabet_sort"', '[data]\nkind = "verifiers"\nnum_tasks = 40')
    samples = [sample for samples in steps for sample in samples]
    assert {num_turns(sample) for sample in samples} == {1, 2}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    for sample in samples:
        first, second = sample.prompt.row["task"]["user_turns"]  # type: ignore[index]
        opening = tokenizer.decode([*sample.prompt.ids, *sample.opening_ids])
        assert opening == f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n"
        if num_turns(sample) == 2:
            said = tokenizer.decode(sample.turns[-2].observation_ids)
            assert said.endswith(f"<|im_start|>user\n{second}<|im_end|>\n<|im_start|>assistant\n")


def test_a_taskset_with_tools_trains(model: Path) -> None:
    steps = train(model, 'taskset = "scratchpad"')
    samples = [sample for samples in steps for sample in samples]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    answers = {tokenizer.decode(turn.observation_ids) for sample in samples for turn in sample.turns}
    for answer in ("written", "error: unknown tool 'nothing'"):
        assert any(f"tool\n{answer}<|im_end|>" in each for each in answers)
    assert {sample.reward for sample in samples} == {0.0, 1.0}


def test_a_taskset_with_two_agents_trains_one_of_them(model: Path, endpoint: str) -> None:
    solver = f'{{ model = "m", client = {{ type = "eval", base_url = "{endpoint}", api_key_var = "NONE" }} }}'
    settings = f'taskset = "proposer_solver"\nagent = "proposer"\nverifiers = {{ solver = {solver} }}'
    steps = train(model, settings)
    for sample in (sample for samples in steps for sample in samples):
        # "three" is short and "three hundred" is not.
        assert sample.reward_metrics["environment/solve_rate"] in (0.0, 0.5, 1.0)
        assert num_turns(sample) == 1
