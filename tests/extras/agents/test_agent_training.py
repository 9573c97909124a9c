"""A run whose episodes are played, and rewarded, by an agent with OpenAI's client."""

import json
import re
from pathlib import Path

import pytest

import tailrace

MODEL = Path(__file__).parents[3] / "examples" / "tools" / "model"
AGENT = Path(__file__).parent / "agents_of_tests.py"
CONFIG = f"""
[run]
rounds = 2
group_size = 2
eval_every = 2
eval_prompts = 2
checkpoint_every = 2

[schedule]
name = "april"
groups_per_round = 3
groups_launched = 5

[model]
path = "{MODEL}"

[data]
kind = "rows"
path = "rows.jsonl"

[environment]
kind = "agent"
function = "{AGENT}:asking_twice"

[sampling]
max_completion_tokens = 32

[engine]
dtype = "float32"
max_num_seqs = 8

[trainer]
dtype = "float32"
"""


def test_an_agent_trains_through_the_endpoint_and_its_parked_episodes_go_on(tmp_path: Path) -> None:
    prompts = [f"Solve the following multiplication: {n} * {n + 1}" for n in range(32)]
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "run.toml").write_text(CONFIG)
    folder = tmp_path / "run"
    summary = tailrace.train(tailrace.load_config(tmp_path / "run.toml"), folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    assert summary.steps == len(steps) == 2
    for row in steps:
        assert (row["num_turns/mean"], row["num_turns/max"]) == (2.0, 2)
        assert row["num_branches/mean"] == pytest.approx(1 + row["rewards/environment/rewritten_history"])
        # Log-probs of the engine are those that the trainer computes of each branch.
        assert row["engine_mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
        assert 0.0 <= row["reward"] <= 1.0
    num_branched = 0
    for path in (folder / "samples").glob("round_*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            opening, first, second = sample["turns"]
            assert opening["num_tokens"] == 0 and len(opening["observation_ids"]) > 5
            assert second["num_tokens"] - first["num_tokens"] <= 3  # its max_tokens
            assert [message["content"] for message in first["messages"]] == ["12 * 34"]
            forgets = re.search(r"\d*[02468]<", sample["prompt"]) is not None
            assert first["begins_branch"] == forgets and len(sample["messages"]) == (1 if forgets else 3)
            num_branched += forgets
    assert num_branched > 0


def test_an_agent_whose_turns_are_cut_trains_on_and_its_samples_say_why(tmp_path: Path) -> None:
    prompts = [f"Solve the following multiplication: {n} * {n + 1}" for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    serial = CONFIG.replace("april", "serial").replace("groups_launched = 5", "groups_per_step = 3")
    (tmp_path / "run.toml").write_text(serial.replace("asking_twice", "cut_short"))
    summary = tailrace.train(tailrace.load_config(tmp_path / "run.toml"), tmp_path / "run")
    assert summary.steps == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("completions/failed/environment_no_reward", 0) for row in rows) > 0
    assert not any("not_applicable" in key for row in rows for key in row)
