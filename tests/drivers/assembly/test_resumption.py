"""What a resumed run reads again is known by its content."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from helpers.small_run import write_small_run
from tailrace.config import RunConfig, load_config
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.resumption import BLOCK, changed_files, inputs_of, opened
from tailrace.drivers.commands.evaluate import evaluated_config
from tailrace.errors import ConfigError
from tailrace.ledger.base import FORMAT, LifeRow, RunRow, Transaction
from tailrace.ledger.store import LEDGER_FILE, Store

MODEL = Path(__file__).parents[3] / "examples" / "tools" / "model"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A config whose files are all its own."""
    path = write_small_run(tmp_path)
    shutil.copytree(MODEL, tmp_path / "model")
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "eval.jsonl")
    (tmp_path / "tools.py").write_text(
        'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: a number.\n    """\n    return a\n',
        encoding="utf-8",
    )
    (tmp_path / "order.py").write_text("async def serial(run):\n    pass\n", encoding="utf-8")
    return path


def config_of(path: Path, **changes: str) -> RunConfig:
    folder = path.parent
    environment = f'{{ kind = "tools", functions = ["{folder}/tools.py:add"] }}'
    files = {"model.path": f"{folder}/model", "data.eval_path": f"{folder}/eval.jsonl"}
    schedule = f'{{ name = "{folder}/order.py:serial" }}'
    return load_config(path, {**files, "environment": environment, "schedule": schedule, **changes})


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


@pytest.mark.parametrize(
    "name",
    [
        "rows.jsonl",
        "eval.jsonl",
        "rewards.py",
        "tools.py",
        "order.py",
        "model/tokenizer.json",
        "model/chat_template.jinja",
        "model/config.json",
        "model/model.safetensors",
    ],
)
def test_another_content_of_a_file_is_seen(config_path: Path, name: str) -> None:
    before = inputs_of(config_of(config_path))
    assert inputs_of(config_of(config_path)) == before
    append(config_path.parent / name)
    assert changed_files(before, inputs_of(config_of(config_path))) == str(config_path.parent / name)


def test_a_file_that_is_added_to_a_folder_is_seen_and_one_that_nothing_reads_is_not(
    config_path: Path,
) -> None:
    before = inputs_of(config_of(config_path))
    (config_path.parent / "notes.md").write_text("not read", encoding="utf-8")
    assert inputs_of(config_of(config_path)) == before
    added = config_path.parent / "model" / "additional.safetensors"
    added.touch()
    assert changed_files(before, inputs_of(config_of(config_path))) == str(added)


def test_one_byte_in_each_block_of_large_weights_is_seen(config_path: Path) -> None:
    weights, size = config_path.parent / "model" / "model.safetensors", 130 * BLOCK
    os.truncate(weights, size)
    before = inputs_of(config_of(config_path))
    with weights.open("r+b") as file:
        for place in range(0, size, 2 * BLOCK):  # as training changes all of them
            file.seek(place + 7)
            file.write(b"\1")
    assert changed_files(before, inputs_of(config_of(config_path))) == str(weights)


def begun(path: Path) -> RunFolder:
    """The folder of a run that has drawn a prompt."""
    folder = RunFolder(path.parent / "out")
    folder.path.mkdir()
    with opened(config_of(path), folder, resume=False) as (store, _):
        assert store
        store.commit(Transaction([RunRow(FORMAT, 1, 0)]))
    return folder


def inputs_of_lives(folder: RunFolder) -> list[dict[str, str]]:
    with closing(Store.open(folder.path / LEDGER_FILE)) as store:
        return [life.inputs for life in store.rows(LifeRow)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rewards.py", "model/chat_template.jinja"])
def test_a_resumption_over_other_content_is_refused_or_is_in_the_ledger(
    config_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder, changed = begun(config_path), config_path.parent / name
    append(changed)
    with pytest.raises(ConfigError) as refused, opened(config_of(config_path), folder, resume=True):
        pass
    assert str(refused.value) == (
        f"run.accept_changed_inputs = False: the run was begun with another content of {changed}; "
        "put it back, begin a new run in another --output-dir, or set this to true"
    )
    assert len(inputs_of_lives(folder)) == 1
    accepted = config_of(config_path, **{"run.accept_changed_inputs": "true"})
    with opened(accepted, folder, resume=True) as (store, start):
        assert store
        store.commit(start.opening)
    assert f"goes on with another content of {changed}" in capsys.readouterr().err
    first, second = inputs_of_lives(folder)
    assert changed_files(first, second) == str(changed)
    with opened(config_of(config_path), folder, resume=True):  # what was accepted is the run's content now
        pass


def test_what_changed_in_the_config_is_said(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(config_path)
    with opened(config_of(config_path, **{"trainer.learning_rate": "1e-2"}), folder, resume=True):
        pass
    said = [line for line in capsys.readouterr().err.splitlines() if "resumed" not in line]
    assert said == ["tailrace: trainer.learning_rate was 0.0001 and is 0.01"]


def test_an_evaluation_says_that_the_rows_are_no_longer_those_of_the_run(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(config_path)
    rows = config_path.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1"}) + "\n", encoding="utf-8")
    evaluated_config(run.path, MODEL, {})
    assert f"warning: the run was trained with another content of {rows}" in capsys.readouterr().err
