"""What a live run refuses before a process is started."""

import json
import shutil
from pathlib import Path

import pytest

from tailrace.config import load_config
from tailrace.drivers.assembly.check import check_live
from tailrace.errors import ConfigError


def test_a_live_run_needs_a_model(config_path: Path) -> None:
    text = config_path.read_text()
    model = text[text.index("[model]") : text.index("[data]")]
    config_path.write_text(text.replace(model, ""))
    with pytest.raises(ConfigError, match=r"model = None: this command needs the section"):
        check_live(load_config(config_path))


def test_a_sound_config_passes(config_path: Path) -> None:
    check_live(load_config(config_path))


EXAMPLES = Path(__file__).parents[3] / "examples"
QUICKSTART = EXAMPLES / "quickstart" / "quickstart.toml"


def test_a_reward_function_whose_parameter_is_no_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, anwser):\n    return 0.0\n")
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(ConfigError, match=r"'anwser' is no column .*columns: question, answer, metadata"):
        check_live(load_config(QUICKSTART, {"reward.function": spec}))


def test_a_reward_function_that_takes_columns_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, answer, finish_reason):\n    return 0.0\n")
    check_live(load_config(QUICKSTART, {"reward.function": f"{tmp_path}/mine.py:f"}))


TOOLS = EXAMPLES / "tools" / "model"


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        ("{{ nothing.at.all }}", "", "messages that the chat template refuses: 'nothing' is undefined"),
        ("{{ raise_exception('No!') }}", "", "messages that the chat template refuses: No!"),
        ("{% if %}", "", "messages that the chat template refuses: Expected an expression"),
        ("", "", "empty prompt: the chat template writes no token for it"),
        (None, "[{", "tools that are not JSON: "),
    ],
)
def test_a_template_or_tools_that_spoil_every_row_are_no_fault_of_the_reward(
    template: str | None, tools: str, said: str, tmp_path: Path
) -> None:
    shutil.copytree(TOOLS, tmp_path / "model")
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = [{"prompt": str(number), "answer": "3", "tools": tools} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def f(completion, answer):\n    return 0.0\n")
    data = f'{{ kind = "rows", path = "{tmp_path}/rows.jsonl" }}'
    changes = {
        "model.path": str(tmp_path / "model"),
        "data": data,
        "reward.function": f"{tmp_path}/mine.py:f",
    }
    with pytest.raises(ConfigError) as error:
        check_live(load_config(QUICKSTART, changes))
    assert error.value.key == "data" and str(error.value.value).startswith(said)
    assert "check the data and the model's chat template" in str(error.value)


MIXTURE = """[data]
kind = "mixture"
sources = [
    {{ name = "file", kind = "rows", path = "rows.jsonl", weight = 3.0 }},
    {{ name = "sums", kind = "reasoning_gym", task = "chain_sum" }},
]

[reward]
{reward}

"""
FUNCTIONS = """functions = [
    { function = "rewards.py:digits" },
    { function = "math", weight = 2.0, sources = ["sums"] },
]"""


def write_mixture(config_path: Path, reward: str) -> None:
    text = config_path.read_text()
    begin, end = text.index("[data]"), text.index("[sampling]")
    config_path.write_text(text[:begin] + MIXTURE.format(reward=reward) + text[end:])


def test_files_named_in_arrays_are_found_beside_the_config_and_functions_are_told(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixture(config_path, FUNCTIONS)
    check_live(load_config(config_path))
    assert capsys.readouterr().err == (
        "tailrace: reward: digits (weight 1): tailrace's signature, given completion; "
        "math (weight 2): tailrace's signature, given completion, column, all columns\n"
    )


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("", "rows bring no scorer of their own"),
        (
            FUNCTIONS.replace('["sums"]', '["sum"]'),
            "'sum': the data have no such source; choose from file, sums",
        ),
        (
            'functions = [{ function = "math", sources = ["sums"] }]',
            "reward.functions.sources = 'file': no function scores this source; add a judge or a",
        ),
    ],
)
def test_sources_without_a_reward_function_and_unknown_ones_are_refused(
    config_path: Path, reward: str, said: str
) -> None:
    write_mixture(config_path, reward)
    with pytest.raises(ConfigError) as refused:
        check_live(load_config(config_path))
    assert said in str(refused.value)


def test_remarks_are_of_each_source(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(TOOLS, config_path.parent / "model")
    (model / "chat_template.jinja").write_text(THINKS.partition("{% if")[0])
    write_mixture(config_path, FUNCTIONS)
    config_path.write_text(config_path.read_text().replace('"file"', '"file", chat_template = "never"'))
    check_live(load_config(config_path, {"model.path": str(model)}))
    assert "the chat template has no generation prompt" in capsys.readouterr().err


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("opens", [True, False])
def test_a_prompt_that_ends_with_an_open_tag_is_said_at_the_start(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], opens: bool
) -> None:
    shutil.copytree(TOOLS, tmp_path / "model")
    template = THINKS if opens else THINKS.replace("<think>\n", "")
    (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    check_live(load_config(config_path, {"model.path": str(tmp_path / "model")}))
    said = r"prompts end with '<think>\n': completions lack it, and rewards get it as completion_prefix"
    assert (said in capsys.readouterr().err) == opens


def test_a_model_of_which_nothing_ends_a_text_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(QUICKSTART.parent / "model", tmp_path / "model")
    for name, key in (
        ("config", "eos_token_id"),
        ("generation_config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}))
    check_live(load_config(QUICKSTART, {"model.path": str(folder)}))
    assert f"warning: nothing ends a text: {folder} names no eos_token_id" in capsys.readouterr().err
    check_live(load_config(QUICKSTART, {"model.path": str(folder), "sampling.stop_token_ids": "[3]"}))
    assert "nothing ends a text" not in capsys.readouterr().err
