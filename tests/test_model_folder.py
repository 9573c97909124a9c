"""Damaged model folders: one message that names the file."""

import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.small_run import write_small_run
from helpers.tiny_models import save_tiny_model
from tailrace import model_folder
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.errors import ConfigError
from tailrace.model_folder import check_files, context_length, draft_tensors, end_of_text_ids, weight_files

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
        check_files(folder)
    assert (caught.value.key, caught.value.value) == ("model.path", str(folder))
    return caught.value.problem


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder: Path, **changed: Tensor) -> None:
    save_file(load_file(folder / WEIGHTS) | changed, folder / WEIGHTS, {"format": "pt"})


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
    check_files(folder)


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


@pytest.mark.parametrize("token", [["</s>"], {"content": ["x"]}, {"a": 1}, 3])
def test_an_end_of_text_that_is_no_token_is_named(folder: Path, token: Any) -> None:
    edit(folder / "tokenizer_config.json", eos_token=token)
    assert refused(folder) == f"tokenizer_config.json: eos_token = {token!r} names no token"


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
    check_files(folder)


@pytest.mark.parametrize("name", ["wte.weight", "language_model.model.embed_tokens.weight"])
def test_a_head_is_compared_with_an_embedding_of_any_name(folder: Path, name: str) -> None:
    tensors = load_file(tied_folder(folder, "another") / WEIGHTS)
    tensors[name] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert refused(folder).endswith("but the weights have another lm_head.weight")


def test_a_copy_of_the_embedding_as_the_head_is_accepted(folder: Path) -> None:
    check_files(tied_folder(folder, "equal"))


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


def test_weights_of_more_layers_than_the_config_has_are_refused(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    assert refused(folder) == (
        "config.json: the model that it describes has no place for 11 weights (model.layers.1."
        "input_layernorm.weight, model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight, "
        "...)"
    )


def test_layers_that_predict_several_tokens_are_no_layers_too_many(folder: Path) -> None:
    names = ["model.layers.2.eh_proj.weight", "model.mtp.layers.7.fc.weight", "mtp.fc.weight"]
    change_weights(folder, **{name: torch.ones(2, 2) for name in names})
    assert refused(folder).endswith("has no place for 1 weights (model.layers.2.eh_proj.weight)")
    edit(folder / "config.json", num_nextn_predict_layers="1")
    assert refused(folder).endswith("has no place for 1 weights (model.layers.2.eh_proj.weight)")
    edit(folder / "config.json", num_nextn_predict_layers=1)
    check_files(folder)
    assert sorted(draft_tensors(folder)) == names


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_codes_of_numbers_without_their_config_are_refused(
    folder: Path, dtype: torch.dtype, named: str
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change_weights(folder, **{name: torch.ones(32, 64).to(dtype)})
    assert refused(folder) == f"{name} is {named}: quantised weights are neither trained nor served"


def test_masks_of_old_checkpoints_and_layers_that_read_images_are_no_defects(folder: Path) -> None:
    mask, image = torch.ones(1, 1, 4, 4, dtype=torch.uint8), "model.vision_tower.layers.40.q_proj.weight"
    change_weights(folder, **{"h.0.attn.bias": mask, image: torch.ones(2, 2)})
    check_files(folder)
    assert draft_tensors(folder) == {}


def test_quantised_weights_are_refused_with_what_can_be_done(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError) as caught:
        check_files(folder)
    assert caught.value.problem.startswith("config.json: quantization_config: quantised weights are neither")
    assert caught.value.remedy == "name the model that they were made from, or a dequantised copy"


def test_computed_tensors_and_parts_for_images_are_no_weights_too_many_but_heads_are(folder: Path) -> None:
    rope = ["h.0.rotary_emb.cos_cached", "model.layers.0.self_attn.rotary_emb.original_inv_freq"]
    images = ["model.image_newline", "model.connector.proj.weight", "model.mm_projector.0.weight"]
    model_folder.check_all_used(folder, rope + images)
    heads = ["score.weight", "v_head.summary.bias"]
    with pytest.raises(ConfigError, match=r"2 weights \(score.*, v_head.*; .*, or remove a value head"):
        model_folder.check_all_used(folder, rope + heads)


@pytest.mark.parametrize("command", ["train --dry-run", "train", "sft", "eval", "diagnose", "serve", "init"])
def test_an_adapter_beside_its_base_is_refused_by_each_command(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    config, out = write_small_run(tmp_path), ["--output-dir", str(tmp_path / "out")]
    rows = ["--data", str(tmp_path / "rows.jsonl"), "--folder", str(tmp_path / "made")]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 40)
    name, *words = command.split()
    words += {"init": ["--model", str(folder), *rows], "serve": [str(folder)]}.get(
        name, [str(config), "--model.path", str(folder), *(out if name in ("train", "sft") else [])]
    )
    assert main([name, *words]) == 2
    assert "adapter_config.json: transformers would add this adapter to its base, and engines would not" in (
        " ".join(capfd.readouterr().err.split())
    )
    assert not (tmp_path / "out").exists() and not (tmp_path / "made").exists()


def test_the_context_length_is_the_number_of_positions(whole: Path) -> None:
    assert context_length(whole) == 512


def found(home: Path, *names: str, **environment: str) -> list[str]:
    """What a process whose cache of the hub is in `home` finds under each name, or its error."""
    code = (
        "import sys, tailrace\n"
        "from tailrace.config import PolicyConfig\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        config = tailrace.load_config('run.toml', {'model.path': name})\n"
        "        print(PolicyConfig.of(config).model.path, end='\\0')\n"
        "    except tailrace.ConfigError as why:\n"
        "        print(why, end='\\0')\n"
    )
    (home / "run.toml").write_text("[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n")
    given = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=home, env=given, capture_output=True, text=True, check=True)
    return done.stdout.removesuffix("\0").split("\0")  # an error of the hub has several lines


def test_a_model_of_the_hub_is_taken_from_the_cache_without_the_network(whole: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--our-lab--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    shutil.copytree(whole, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    check_files(snapshot)
    both = cache.with_name("models--our-lab--here")
    shutil.copytree(cache, both)
    (tmp_path / "our-lab").mkdir()
    shutil.copytree(whole, tmp_path / "our-lab" / "here")
    assert found(tmp_path, "our-lab/tiny", "our-lab/here") == [str(snapshot), "our-lab/here"]


def test_a_model_that_the_hub_does_not_give_is_refused_with_the_other_ways(tmp_path: Path) -> None:
    (said,) = found(tmp_path, "our-lab/other", HF_HUB_OFFLINE="1")
    assert said.startswith("model.path = 'our-lab/other': there is no such folder, and the Hugging Face hub")
    assert said.endswith("; name a folder, or, where there is a network, unset HF_HUB_OFFLINE")
    (said,) = found(tmp_path, "our-lab/other")
    assert "gives no such model" in said


class RefusingHub(BaseHTTPRequestHandler):
    """A hub that lists a gated model, and gives nothing."""

    def do_GET(self) -> None:
        is_gated = "/our-lab/gated/" in self.path
        file = {"type": "file", "path": "config.json", "size": 2, "oid": "1" * 40}
        body = json.dumps([file] if "/tree/" in self.path else {"id": "our-lab/gated", "sha": "0" * 40})
        is_listed = is_gated and self.path.startswith("/api/")
        self.send_response(200 if is_listed else 403 if is_gated else 401)
        self.send_header("X-Error-Code", "" if is_listed else "GatedRepo" if is_gated else "RepoNotFound")
        self.send_header("Content-Length", str(len(body) * is_listed))
        self.end_headers()
        self.wfile.write(body.encode() * is_listed)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_that_the_hub_refuses_is_named_with_what_gives_access(tmp_path: Path) -> None:
    names = "our-lab/gated", "our-lab/private"
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        assert found(tmp_path, *names, HF_ENDPOINT=endpoint) == [
            f"model.path = {name!r}: there is no such folder, and the Hugging Face hub gives no such model "
            "to this account; correct it; to a gated or private model ask for access on its page, and set "
            "HF_TOKEN"
            for name in names
        ]
        server.shutdown()


def test_the_id_of_a_model_in_a_config_stays_unless_there_is_such_a_folder(tmp_path: Path) -> None:
    text = "[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n[model]\npath = 'our-lab/tiny'\n"
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    assert config.model and config.model.path == Path("our-lab/tiny")
    (tmp_path / "our-lab" / "tiny").mkdir(parents=True)
    config = load_config(tmp_path / "run.toml")
    assert config.model and config.model.path == tmp_path / "our-lab" / "tiny"
