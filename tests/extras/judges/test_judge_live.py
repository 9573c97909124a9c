"""A live run whose reward is that of a function, of a judge behind an endpoint, and of two judge models."""

import json
from pathlib import Path

import pytest
from judge_cases import serving_on_a_thread

from helpers.tiny_models import LETTERS, save_tiny_model
from tailrace.api import train
from tailrace.config import load_config
from tailrace.drivers.assembly.check import check_live
from tailrace.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
CONFIG = """
[run]
rounds = 1
group_size = 2
eval_every = 0

[schedule]
name = "serial"
groups_per_round = 2
groups_per_step = 2

[model]
path = "{model}"

[data]
kind = "rows"
path = "rows.jsonl"

[reward]
function = "exact_match"
timeout_s = 60

[[reward.judges]]
kind = "endpoint"
name = "words"
weight = 2.0
url = "{url}"
model = "judge"
template = "{{prompt}}{{completion}}"
cache_folder = "answers"

[[reward.judges]]
kind = "local"
name = "streamed"
path = "judge"
template = "{{completion}}{{answer}}"
labels = ["B", "C"]
memory_mib = 1
max_tokens = 64

[[reward.judges]]
kind = "local"
name = "written"
path = "judge"
template = "{{completion}}"
labels = []
pattern = "(.)"
values = {{ {values} }}
memory_mib = 1
max_tokens = 64

[sampling]
max_completion_tokens = 4
"""


def test_the_reward_is_the_sum_of_a_function_and_three_judges(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "judge", num_hidden_layers=12)
    rows = [json.dumps({"prompt": f"{n} + 1 =\n", "answer": "AB"}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with serving_on_a_thread(503, "Score: 0.75") as endpoint:
        values = ", ".join(f'"{letter.lower()}" = 0.5' for letter in LETTERS[:26])
        text = CONFIG.format(model=QUICKSTART / "model", url=endpoint.url, values=values)
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"the judge cannot be reached \(HTTP 503"):
            check_live(load_config(tmp_path / "run.toml"))
        train(load_config(tmp_path / "run.toml"), tmp_path / "out")
    files = (tmp_path / "out" / "samples").glob("*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) == 4
    for record in records:
        parts = record["rewards"]
        assert parts.keys() == {"exact_match", "words", "streamed", "written"}
        total = parts["exact_match"] + 2 * 0.75 + parts["streamed"] + 0.5
        assert record["reward"] == pytest.approx(total)
        assert 0 < parts["streamed"] < 1
        assert parts["written"] == 0.5
        answers = record["reward_columns"]
        assert answers.keys() == {"words/answer", "written/answer"}
        assert answers["words/answer"] == "Score: 0.75" and len(answers["written/answer"]) == 1
    assert len(list((tmp_path / "answers").rglob("*.txt"))) >= 2
