"""A live run whose reward has three parts: a function, a served engine as the judge, and a judge model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny_models import LETTERS, letter_tokenizer, save_tiny_model
from tailrace.api import train
from tailrace.commands.live import check_live
from tailrace.config import load_config
from tailrace.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
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
name = "served"
weight = 2.0
url = "{url}/v1"
model = "judge"
template = "{{prompt}}{{completion}}"
pattern = '(.)'
scale = [0, {last}]
parameters = {{ temperature = 0.0, max_tokens = 2 }}
cache_folder = "answers"

[reward.judges.values]
{values}

[[reward.judges]]
kind = "model"
name = "streamed"
path = "judge"
template = "{{completion}}{{answer}}"
labels = ["B", "C"]
memory_mib = 1
max_tokens = 64

[sampling]
max_completion_tokens = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A config, its data, and a judge that is served and loaded."""
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "judge", num_hidden_layers=12, vocab_size=len(LETTERS))
    letter_tokenizer(CHAT_TEMPLATE).save_pretrained(folder / "judge")
    rows = [json.dumps({"prompt": f"{n} + 1 =\n", "answer": "AB"}) for n in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "tailrace.cli", "serve", str(folder / "judge"), "--port", "0"]
    server = subprocess.Popen([*command, "--served-model-name", "judge"], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    try:
        label, url = server.stdout.readline().split()
        assert label == "serving"
        values = {letter.lower(): number for number, letter in enumerate(LETTERS)}
        words = "\n".join(f"{json.dumps(letter)} = {number}" for letter, number in values.items())
        text = CONFIG.format(model=QUICKSTART / "model", url=url, values=words, last=len(LETTERS) - 1)
        (folder / "run.toml").write_text(text)
        yield folder
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def test_the_reward_is_the_sum_of_a_function_and_two_judges(folder: Path) -> None:
    train(load_config(folder / "run.toml"), folder / "out")
    files = (folder / "out" / "samples").glob("*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) == 4
    for record in records:
        parts = record["rewards"]
        assert parts.keys() == {"exact_match", "served", "streamed"}
        assert record["reward"] == pytest.approx(
            parts["exact_match"] + 2 * parts["served"] + parts["streamed"]
        )
        assert 0 < parts["streamed"] < 1
        assert len(record["reward_columns"]["served/answer"]) == 2
    assert (folder / "answers").is_dir()


def test_an_endpoint_without_the_model_is_refused_before_anything_starts(folder: Path) -> None:
    text = (folder / "run.toml").read_text().replace('model = "judge"', 'model = "other"')
    (folder / "other.toml").write_text(text)
    with pytest.raises(ConfigError, match="'other': the endpoint has no such model; choose from judge"):
        check_live(load_config(folder / "other.toml"))
