"""Tables: which file, folder and split the training and the evaluation prompts come from."""

import pytest

from tailrace.drivers.data import rows
from tailrace.drivers.data.rows import open_table
from tailrace.drivers.data.settings import RowsSettings
from tailrace.errors import ConfigError

SPLITS = {name: [{"prompt": f"{name} {n}"} for n in range(3)] for name in ("train", "validation", "test")}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Stands in for reading: what each folder holds. The reading itself is tested below."""
    held = {}
    monkeypatch.setattr(rows, "_read", lambda settings, of, path: held[path.name])

    def settings(found, found_for_eval=None, **given):
        held.update(data=found, held_out=found_for_eval)
        if found_for_eval is not None:
            given["eval_path"] = tmp_path / "held_out"
        return RowsSettings(path=tmp_path / "data", **given)

    return settings


def some(*names):
    return {name: SPLITS[name] for name in names}


@pytest.mark.parametrize(
    ("found", "given", "train", "evaluation", "shared"),
    [
        (some("train", "validation", "test"), {}, "train", "test", False),
        (some("train", "validation"), {}, "train", "validation", False),
        (some("train", "validation", "test"), {"eval_split": "validation"}, "train", "validation", False),
        (some("validation", "test"), {"split": "validation"}, "validation", "test", False),
        (some("train"), {}, "train", "train", True),
        (some("train", "test"), {"eval_split": "train"}, "train", "train", True),
        (some("train", "test"), {"split": "test"}, "test", "test", True),
    ],
)
def test_a_folder_with_splits_brings_its_evaluation_set(folders, found, given, train, evaluation, shared):
    settings = folders(found, **given)
    assert open_table(settings, "train") == (SPLITS[train], shared)
    assert open_table(settings, "eval") == (SPLITS[evaluation], shared)


@pytest.mark.parametrize(
    ("found", "given", "evaluation"),
    [
        (some("train", "test"), {}, "test"),
        (some("train"), {}, "train"),
        (some("train", "validation"), {"eval_split": "train"}, "train"),
    ],
)
def test_an_evaluation_path_wins_over_the_splits_of_the_data(folders, found, given, evaluation):
    settings = folders(some("train", "test"), found, **given)
    assert open_table(settings, "train") == (SPLITS["train"], False)
    assert open_table(settings, "eval") == (SPLITS[evaluation], False)


@pytest.mark.parametrize(
    ("found", "for_eval", "given", "split", "said"),
    [
        (
            some("validation", "test"),
            None,
            {},
            "train",
            r"data\.split = 'train': .* has no such split; choose from v",
        ),
        (
            some("train"),
            None,
            {"eval_split": "test"},
            "eval",
            r"data\.eval_split = 'test': .* choose from train$",
        ),
        (
            some("train"),
            {"dev": [], "train": []},
            {},
            "eval",
            r"data\.eval_path = .*: it has the splits dev, train, and none of test and validation; name one",
        ),
    ],
)
def test_a_split_that_is_not_there_is_named_with_those_that_are(folders, found, for_eval, given, split, said):
    with pytest.raises(ConfigError, match=said):
        open_table(folders(found, for_eval, **given), split)


def test_a_folder_that_is_no_data_set_is_a_config_error(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="it is neither a JSONL file, a parquet file nor a dataset folder"):
        open_table(RowsSettings(path=tmp_path / "data"), "train")


@pytest.mark.parametrize("form", ["parquet", "saved", "saved_dict", "folder"])
def test_parquet_and_dataset_folders_are_read_without_progress_bars(tmp_path, monkeypatch, capsys, form):
    datasets = pytest.importorskip("datasets")
    datasets.enable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    train, test = (datasets.Dataset.from_list(SPLITS[name]) for name in ("train", "test"))
    path = tmp_path / "data"
    match form:
        case "parquet":
            path = tmp_path / "data.parquet"
            train.to_parquet(path)
        case "saved":
            train.save_to_disk(path)
        case "saved_dict":
            datasets.DatasetDict({"train": train, "test": test}).save_to_disk(path)
        case "folder":
            path.mkdir()
            train.to_parquet(path / "train.parquet")
            test.to_parquet(path / "test.parquet")
    settings = RowsSettings(path=path)
    capsys.readouterr()
    for split, name in (("train", "train"), ("eval", "test")):
        table, shared = open_table(settings, split)
        assert shared == (form in ("parquet", "saved"))
        assert [table[place] for place in range(3)] == SPLITS["train" if shared else name]
    assert capsys.readouterr() == ("", "")
