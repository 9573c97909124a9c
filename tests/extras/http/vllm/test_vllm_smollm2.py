"""A real model learns on vLLM, in both types, on servers that the run starts and on servers that it joins.

$TAILRACE_SMOLLM2 names its folder (examples/smollm2/convert.py).
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import pytest
from vllm_cases import running

from tailrace.api import load_config, train
from tailrace.extras.http import vllm
from tailrace.extras.http.server import free_port
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm import write_plugin

pytestmark = pytest.mark.vllm
UPDATES = 20
TOPICS = ("the weather", "a house", "music", "the sea", "a bicycle", "cooking", "a garden", "history")
REWARD = """
def digits(completion: str) -> float:
    return sum(each.isdigit() for each in completion) / max(len(completion), 1)
"""
CONFIG = f"""
[run]
rounds = {UPDATES}
group_size = 8
checkpoint_every = 0
[schedule]
name = "pipelinerl"
groups_per_step = 2
in_flight_per_engine = 24
ring_groups = 4
[model]
path = "MODEL"
[data]
kind = "rows"
path = "rows.jsonl"
max_prompt_tokens = 64
chat_template = "never"
[sampling]
max_completion_tokens = 16
[reward]
function = "rewards.py:digits"
[engine]
kind = "vllm"
args = ["--enforce-eager"]
env = {{ VLLM_CPU_KVCACHE_SPACE = "1", VLLM_CPU_NUM_OF_RESERVED_CPU = "1" }}
[trainer]
learning_rate = 3e-5
max_tokens_per_microbatch = 1024
"""


@pytest.mark.parametrize("how", ["started", "joined"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_learns_and_loses_no_token_in_20_updates_in_flight(
    dtype: str, how: str, tmp_path: Path
) -> None:
    """The share of digits in the answers is the reward."""
    model = os.environ.get("TAILRACE_SMOLLM2") or pytest.skip("$TAILRACE_SMOLLM2 is not set")
    (tmp_path / "run.toml").write_text(CONFIG.replace("MODEL", model))
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Some numbers about {topic}:"}) for topic in TOPICS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    dtypes = {"engine.dtype": dtype, "trainer.dtype": dtype}
    config = load_config(tmp_path / "run.toml", dtypes)
    assert isinstance(config.engine, VllmEngineSettings)
    assert config.sampling and config.model
    launch = vllm.launch(
        config.engine,
        config.sampling,
        model=config.model.path,
        max_context=256,
        port=(port := free_port()),
        plugins=write_plugin(tmp_path / "plugin"),
    )
    with nullcontext() if how == "started" else running(launch, port, tmp_path) as url:
        if url:
            config = load_config(tmp_path / "run.toml", dtypes | {"engine.urls": f'["{url}"]'})
        summary = train(config, tmp_path / "run")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rewards = [line["reward"] for line in lines if "reward" in line and "loss" in line]
    print(f"{dtype}, {how}: rewards {rewards}")
    assert len(rewards) == summary.steps == UPDATES
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    tokens = summary.tokens
    assert tokens.generated == tokens.trained + tokens.parked + sum(tokens.wasted.values())
    assert set(tokens.wasted) <= {"ready_overflow"}
    # Generation went on during all training, so that every update met requests in flight.
    assert tokens.wasted["ready_overflow"] > tokens.trained
    assert summary.mismatch_kl is not None and summary.mismatch_kl < 0.05
