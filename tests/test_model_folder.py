"""Damaged model folders: one message that names the file."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers.tiny_models import save_tiny_model
from tailrace.config import load_config
from tailrace.drivers.engine.native.support import check_model
from tailrace.errors import ConfigError
from tailrace.model_folder import check_files, context_length, end_of_text_ids, weight_files

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(folder)
    assert (caught.value.key, caught.value.value) == ("model.path", str(folder))
    return caught.value.problem


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_whole_folder_passes(whole: Path) -> None:
    check_files(whole)
    assert [file.name for file in weight_files(whole)] == [WEIGHTS]


def test_a_missing_folder_or_config_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent") == "there is no such folder"
    assert refused(tmp_path) == "the folder has no config.json"


def test_a_config_that_is_not_a_json_object_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert refused(folder).startswith("config.json is not JSON (")
    (folder / "config.json").write_text("[]")
    assert refused(folder) == "config.json is not a JSON object"


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refused(folder) == "the folder has no safetensors weights"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_pipe_is_named_and_not_read(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name} is a pipe or a device; copy the folder again"):
        check_files(folder)


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}))
    assert refused(folder) == "model.safetensors.index.json: model-2.safetensors is missing"
    index.write_text("{}")
    assert refused(folder) == "model.safetensors.index.json: the weight_map is missing"


def test_weights_of_another_size_than_their_header_says_are_named(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    for damaged in (content[:-100], content + b"x", content[:50]):
        (folder / WEIGHTS).write_bytes(damaged)
        assert refused(folder).startswith(f"{WEIGHTS} is damaged (")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"abc",
        b"\xff" * 200,
        (9).to_bytes(8, "little") + b'{"a": 12}' + b"\0" * 9,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
    ],
)
def test_garbage_weights_are_named(folder: Path, garbage: bytes) -> None:
    (folder / WEIGHTS).write_bytes(garbage)
    assert refused(folder).startswith(f"{WEIGHTS} is damaged (")


def test_weights_without_a_tensor_are_named(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"{}")
    assert refused(folder) == f"{WEIGHTS} holds no tensors"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be a whole number of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number of at least 1"),
        ({"hidden_size": -32}, "hidden_size = -32 must be a whole number of at least 1"),
        ({"intermediate_size": 1.5}, "intermediate_size = 1.5 must be a whole number of at least 1"),
        ({"vocab_size": 0}, "vocab_size = 0 must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size = None must be a whole number of at least 1"),
        (
            {"max_position_embeddings": "9"},
            "max_position_embeddings = '9' must be a whole number of at least 1",
        ),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1 must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of num_key_value_heads"),
        ({"head_dim": True}, "head_dim = True must be a whole number of at least 1"),
        ({"head_dim": 7}, "the size of an attention head must be even"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size = 30 must be a multiple of num_attention_heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1 must be a positive number"),
        ({"rope_parameters": "yarn"}, "the rope section 'yarn' must be an object"),
        ({"rope_parameters": {"rope_theta": "much"}}, "rope_theta = 'much' must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
            "factor = 0 must be a positive number",
        ),
    ],
)
def test_impossible_values_of_the_config_are_named(folder: Path, changes: Any, problem: str) -> None:
    edit(folder / "config.json", **changes)
    assert refused(folder) == f"config.json: {problem}"


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, -2]}'])
def test_a_bad_generation_config_is_named(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    assert refused(folder).startswith("generation_config.json")


def test_an_end_of_text_token_outside_of_the_vocabulary_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 99999]}')
    assert refused(folder) == "eos_token_id 99999 is outside of the vocabulary of 61 tokens"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=60)
    assert refused(folder) == "config.json: vocab_size = 60, but tokenizer.json has ids up to 60"
    edit(folder / "config.json", vocab_size=61)
    edit(folder / "tokenizer.json", added_tokens=[{"id": 61, "content": "<new>"}])
    assert refused(folder) == "config.json: vocab_size = 61, but tokenizer.json has ids up to 61"
    (folder / "tokenizer.json").write_text("{")
    assert refused(folder).startswith("tokenizer.json is not JSON")
    (folder / "tokenizer.json").unlink()
    check_model(folder)


@pytest.mark.parametrize(
    ("generation", "config", "token", "ids"),
    [
        ({"eos_token_id": [3, 4]}, 5, "G", {3, 4, 5, 6}),
        ({"temperature": 0.6}, 5, None, {5}),
        ({"eos_token_id": None}, [5], {"content": "H"}, {5, 7}),
        ({"eos_token_id": []}, None, "G", {6}),
        (None, None, "not a token", set()),
        (None, 0, None, {0}),
    ],
)
def test_a_text_ends_with_each_token_that_any_file_names(
    folder: Path, generation: Any, config: Any, token: Any, ids: set[int]
) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "tokenizer_config.json", eos_token=token)
    assert end_of_text_ids(folder) == ids


def test_no_name_of_the_end_of_text_is_no_token(folder: Path) -> None:
    edit(folder / "tokenizer.json", added_tokens=[{"id": 9, "content": "None"}])
    edit(folder / "tokenizer_config.json", eos_token=None)
    before = end_of_text_ids(folder)
    assert 9 not in before
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "H"}}')
    assert end_of_text_ids(folder) == before | {7}


def tied_folder(folder: Path, head: str) -> Path:
    """A model whose config says that its embeddings are tied, and whose weights have an lm_head."""
    tensors = load_file(folder / WEIGHTS)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head == "equal" else embedding + 0.25
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    edit(folder / "config.json", tie_word_embeddings=True)
    return folder


def test_a_head_of_its_own_under_tied_embeddings_is_refused(folder: Path) -> None:
    assert refused(tied_folder(folder, "another")) == (
        "config.json: tie_word_embeddings = true, but the weights have another lm_head.weight"
    )
    edit(folder / "config.json", tie_word_embeddings=False)
    check_model(folder)


def test_a_copy_of_the_embedding_as_the_head_is_accepted(folder: Path) -> None:
    check_model(tied_folder(folder, "equal"))


def test_an_embedding_of_another_size_than_the_vocabulary_is_refused(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=64)
    assert refused(folder) == "config.json: vocab_size = 64, but model.embed_tokens.weight has 61 rows"


def test_weights_of_an_index_and_others_beside_them_are_not_mixed(folder: Path) -> None:
    names = list(load_file(folder / WEIGHTS))
    shutil.copy(folder / WEIGHTS, folder / "model-00001-of-00001.safetensors")
    assert weight_files(folder) == [folder / WEIGHTS]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(folder) == "model.safetensors.index.json does not name model.safetensors"
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    assert weight_files(folder) == [folder / "model-00001-of-00001.safetensors"]


def test_the_context_length_is_the_number_of_positions(whole: Path) -> None:
    assert context_length(whole) == 512


def found(home: Path, name: str, **environment: str) -> str:
    """What a process whose cache of the hub is in `home` finds under a name, or its error."""
    code = (
        "import sys, tailrace\n"
        "from tailrace.config import with_model_folder\n"
        "try:\n"
        "    config = tailrace.load_config('run.toml', {'model.path': sys.argv[1]})\n"
        "    print(with_model_folder(config).model.path)\n"
        "except tailrace.ConfigError as why:\n"
        "    print(why)\n"
    )
    (home / "run.toml").write_text("[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n")
    given = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    command = [sys.executable, "-c", code, name]
    return subprocess.run(
        command, cwd=home, env=given, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_model_of_the_hub_is_taken_from_the_cache_without_the_network(whole: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--our-lab--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    shutil.copytree(whole, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    assert found(tmp_path, "our-lab/tiny") == str(snapshot)
    check_files(snapshot)
    (tmp_path / "our-lab").mkdir()
    shutil.copytree(whole, tmp_path / "our-lab" / "tiny")
    assert found(tmp_path, "our-lab/tiny") == "our-lab/tiny"


def test_a_model_that_the_hub_does_not_give_is_refused_with_the_other_ways(tmp_path: Path) -> None:
    said = found(tmp_path, "our-lab/other", HF_HUB_OFFLINE="1")
    assert said.startswith("model.path = 'our-lab/other': there is no such folder, and the Hugging Face hub")
    assert said.endswith("; name a folder, or, where there is a network, unset HF_HUB_OFFLINE")
    assert "gives no such model" in found(tmp_path, "our-lab/other")


def test_the_id_of_a_model_in_a_config_stays_unless_there_is_such_a_folder(tmp_path: Path) -> None:
    text = "[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n[model]\npath = 'our-lab/tiny'\n"
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    assert config.model and config.model.path == Path("our-lab/tiny")
    (tmp_path / "our-lab" / "tiny").mkdir(parents=True)
    config = load_config(tmp_path / "run.toml")
    assert config.model and config.model.path == tmp_path / "our-lab" / "tiny"
