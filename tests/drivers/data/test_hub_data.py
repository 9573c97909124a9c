"""Data sets of the hub by their ids: from a server with its routes, by the real libraries."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.hub_data import DataHub, commit_of, data_hub, json_lines, parquet
from helpers.small_run import train_here, write_small_run
from tailrace import model_folder
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.data import settings as data_settings
from tailrace.drivers.data.encoding import PromptEncoder
from tailrace.drivers.data.rows import RowPrompts
from tailrace.drivers.data.settings import MixtureSettings, RowsSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.ledger.base import LifeRow
from tailrace.ledger.store import open_store

TEMPLATE = "{question} ="


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DataHub]:
    with data_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def rows(name: str, num: int = 4) -> list[dict[str, object]]:
    return [{"question": f"{name} {n}", "answer": f"so it is #### {n}"} for n in range(num)]


def texts(settings: RowsSettings, tokenizer, split: str = "train") -> set[str]:
    prompts = RowPrompts(settings, PromptEncoder(settings, tokenizer), 0, split)
    return {prompts[index].given for index in range(len(prompts.places))}


README = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: long
  data_files: [{split: train, path: long/train.jsonl}, {split: dev, path: long/dev.jsonl}]
---
"""
SHAPES = {
    "parquet": {"data/train-00000-of-00001.parquet": parquet, "data/test-00000-of-00001.parquet": parquet},
    "jsonl": {"train.jsonl": json_lines, "test.jsonl": json_lines},
    "configs": {
        f"{config}/{split}.jsonl": json_lines
        for config, split in (("main", "train"), ("main", "test"), ("long", "train"), ("long", "dev"))
    },
}


def files_of(shape: str, mark: str = "") -> dict[str, bytes]:
    files = {name: write(rows(mark + Path(name).name.split("-")[0])) for name, write in SHAPES[shape].items()}
    return files | ({"README.md": README} if shape == "configs" else {})


@pytest.mark.parametrize(("shape", "config"), [("parquet", None), ("jsonl", None), ("configs", "main")])
def test_an_id_of_the_hub_is_downloaded_once_and_gives_prompts_of_its_columns(hub, tokenizer, shape, config):
    hub.commits["lab/sums"] = [files_of(shape)]
    settings = RowsSettings(path="lab/sums", config=config, prompt_template=TEMPLATE).pinned()
    assert settings.revision == commit_of(0)
    suffix = "" if shape == "parquet" else ".jsonl"
    assert texts(settings, tokenizer) == {f"train{suffix} {n} =" for n in range(4)}
    assert texts(settings, tokenizer, "eval") == {f"test{suffix} {n} =" for n in range(4)}
    num_asked = len(hub.asked)
    assert settings.pinned() == settings and texts(settings, tokenizer)
    assert len(hub.asked) == num_asked


def test_a_revision_names_a_commit_and_an_evaluation_set_has_its_own(hub, tokenizer):
    hub.commits["lab/sums"] = [files_of("jsonl", "old "), files_of("jsonl", "new ")]
    hub.commits["lab/long"] = [files_of("configs")]
    hub.tags["v1"] = 0
    settings = RowsSettings(
        path="lab/sums", revision="v1", prompt_template=TEMPLATE,
        eval_path="lab/long", eval_config="long", eval_split="dev",
    ).pinned()  # fmt: skip
    assert (settings.revision, settings.eval_revision) == (commit_of(0), commit_of(0))
    assert texts(settings, tokenizer) == {f"old train.jsonl {n} =" for n in range(4)}
    assert texts(settings, tokenizer, "eval") == {f"dev.jsonl {n} =" for n in range(4)}
    source = {"kind": "rows", "name": "sums", "path": Path("lab/sums")}
    mixed = MixtureSettings(sources=(source,))
    begun = MixtureSettings(sources=({**source, "revision": commit_of(0)},))
    assert [each.revision for each in mixed.pinned(begun).sources] == [commit_of(0)]
    assert [each.revision for each in mixed.pinned().sources] == [commit_of(1)]


def test_a_path_that_exists_wins_over_the_hub(hub, tokenizer, tmp_path, monkeypatch):
    hub.commits["lab/sums"] = [files_of("jsonl")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "sums").mkdir(parents=True)
    (tmp_path / "lab" / "sums" / "train.jsonl").write_bytes(json_lines(rows("here")))
    settings = RowsSettings(path="lab/sums", prompt_template=TEMPLATE)
    assert settings.pinned() == settings and hub.asked == []
    assert texts(settings, tokenizer) | texts(settings, tokenizer, "eval") == {
        f"here {n} =" for n in range(4)
    }
    with pytest.raises(ConfigError, match=r"data\.revision = 'v1': it is of a data set of the hub; remove"):
        settings.changed(revision="v1").pinned()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": None}, r"data\.config = None: lab/sums has several configs; choose from main, long"),
        ({"config": "mian"}, r"data\.config = 'mian': lab/sums has no such config; choose from main, long"),
        ({"split": "dev"}, r"data\.split = 'dev': lab/sums has no such split; choose from train, test"),
        (
            {"prompt_template": "{questoin}"},
            r"data\.prompt_template = '{questoin}': none of the 4 rows of lab/sums has every column of it "
            r"\(columns: answer, question\); name those of a row",
        ),
        ({"revision": "v9"}, r"data\.path = 'lab/sums': the Hugging Face hub has no revision 'v9' of it; "),
        (
            {"path": "lab/other"},
            "no such file or folder, and the .* hub gives no such data set to this account;",
        ),
        ({"path": "lab/a.jsonl"}, r"data\.path = 'lab/a\.jsonl': there is no such file or folder; name"),
    ],
)
def test_what_the_hub_does_not_have_is_named_with_what_it_has(hub, tokenizer, given, said):
    hub.commits["lab/sums"] = [files_of("configs")]
    whole = {"path": "lab/sums", "config": "main", "prompt_template": TEMPLATE}
    with pytest.raises(ConfigError, match=said):
        texts(RowsSettings(**(whole | given)).pinned(), tokenizer)


@pytest.mark.parametrize("template", ["{}", "{question:>9}", "{question!r}", "{question", "a } b"])
def test_a_template_whose_braces_hold_no_column_is_refused(template):
    with pytest.raises(ValueError, match="prompt_template"):
        RowsSettings(path="lab/sums", prompt_template=template)


def test_braces_of_the_text_are_doubled_and_values_are_not_read_as_templates(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_bytes(json_lines([{"q": "{n}", "n": 1}, {"q": "x", "n": 2}, {"q": "y"}]))
    settings = RowsSettings(path=tmp_path / "rows.jsonl", prompt_template="{q}: \\boxed{{{n}}}")
    prompts = RowPrompts(settings, PromptEncoder(settings, tokenizer), 0, "train")
    assert [prompts.row(place)["prompt"] for place in range(2)] == ["{n}: \\boxed{1}", "x: \\boxed{2}"]
    with pytest.raises(BadRow, match="no column of the prompt's template: 'n'; columns: q"):
        prompts.row(2)


def test_a_hub_that_does_not_answer_is_given_up_after_its_limit(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(model_folder, "HUB_LIMIT_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"gives no such data set \(.*timed out.*; name a folder"):
            RowsSettings(path="lab/sums").pinned()


def test_the_hub_is_not_asked_without_the_package_that_reads_data_sets(hub, monkeypatch):
    monkeypatch.setattr(data_settings, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package datasets; correct it, or .*\[datasets\]"):
        RowsSettings(path="lab/sums").pinned()
    assert hub.asked == []


def test_a_run_is_resumed_at_the_commit_with_which_it_began(hub, tmp_path):
    sums = [{"question": f"{n % 10} + {n % 7}", "answer": n} for n in range(60)]
    hub.commits["lab/sums"] = [{"train.parquet": parquet(sums)}]
    config = write_small_run(tmp_path)
    words = ["--data.path", "lab/sums", "--data.prompt_template", "{question} =\n"]
    assert train_here(config, *words, "--run.rounds", "1") == 0
    hub.commits["lab/sums"].append({"train.parquet": parquet(rows("other", 60))})
    RowsSettings(path="lab/sums", revision="main").pinned()
    (tmp_path / "cache" / "hub" / "datasets--lab--sums" / "refs" / "main").write_text(commit_of(1))
    assert train_here(config, *words, "--run.rounds", "2", "--resume") == 0
    folder = RunFolder(tmp_path / "out")
    data = folder.read_config().data
    assert isinstance(data, RowsSettings) and str(data.path) == "lab/sums" and data.revision == commit_of(0)
    store = open_store(folder.read_config().ledger, folder.path, only_read=True)
    assert [json.loads(life.config)["data"]["revision"] for life in store.rows(LifeRow)] == [commit_of(0)] * 2
    store.close()
    trained = [
        json.loads(line) for file in folder.samples.glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    assert trained and all(row["prompt"].endswith(" =\n") and "other" not in row["prompt"] for row in trained)
