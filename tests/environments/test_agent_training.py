"""A run whose episodes are played by an agent with OpenAI's client."""

import json
from pathlib import Path

import pytest

import tailrace

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.toml"
AGENT = Path(__file__).parent / "agents_of_tests.py"


def test_an_agent_trains_through_the_endpoint_and_its_parked_episodes_go_on(tmp_path: Path) -> None:
    overrides = {
        "run.rounds": 2,
        "run.group_size": 2,
        "run.eval_every": 2,
        "run.eval_prompts": 2,
        "run.checkpoint_every": 2,
        "schedule.groups_per_round": 3,
        "schedule.groups_launched": 5,
        "environment.function": f"{AGENT}:asking_twice",
        "engine.max_num_seqs": 8,
        "reward.workers": 1,
    }
    summary = tailrace.train(tailrace.load_config(EXAMPLE, overrides), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert summary.steps == len(steps) == 2
    for row in steps:
        assert (row["num_turns/mean"], row["num_turns/max"]) == (2.0, 2)
        assert row["rewards/environment/rewritten_history"] == 0.0
        assert row["engine_mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
        assert 0.0 <= row["reward"] <= 1.0
    for path in (tmp_path / "samples").glob("round_*.jsonl"):
        for line in path.read_text().splitlines():
            opening, first, second = json.loads(line)["turns"]
            assert opening["num_tokens"] == 0 and len(opening["observation_ids"]) > 10
            assert second["num_tokens"] - first["num_tokens"] <= 3  # its max_tokens
            assert [message["content"] for message in first["messages"]] == ["12 * 34"]
