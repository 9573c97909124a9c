"""The manifest of a publication, and the two halves of a transfer."""

import asyncio
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from helpers.architectures import SHAPES, random_model
from helpers.tiny_models import save_tiny_model
from tailrace.contracts.weights import TensorInfo, Weights, send_and_load
from tailrace.drivers.models.causal_lm import as_in_files
from tailrace.drivers.weights.manifest import check_tensors, expected_tensors
from tailrace.drivers.weights.settings import (
    FilesystemSettings,
    SharedMemorySettings,
    WeightsSettings,
)
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import ConfigError, TransferFailed, WeightsRefused

A, B = TensorInfo("a", (2, 3), "float32"), TensorInfo("b", (4,), "bfloat16")


def test_the_expected_tensors_are_accepted_in_any_order() -> None:
    check_tensors([A, B], [B, A])


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ([A], "1 missing: b"),
        ([A, B, TensorInfo("c", (), "float32")], "1 not in the model: c"),
        ([A._replace(shape=(3, 2)), B], r"1 of another shape: a \[3, 2\] in place of \[2, 3\]"),
        ([A, B._replace(dtype="float32")], "1 of another type: b float32 in place of bfloat16"),
        ([A._replace(name="x")], "2 missing: a, b; 1 not in the model: x"),
        ([A, B, *(A._replace(name=f"x{n}") for n in range(4))], "4 not in the model: x0, x1, x2, ...$"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(offered: list[TensorInfo], message: str) -> None:
    with pytest.raises(WeightsRefused, match=f"the published weights are not those of the model; {message}"):
        check_tensors(offered, [A, B])


@pytest.mark.parametrize("tied", [True, False])
def test_the_expected_tensors_are_the_parameters_of_the_model(tmp_path: Path, tied: bool) -> None:
    model = save_tiny_model(tmp_path, tie_word_embeddings=tied)
    trained = manifest({name: weight.bfloat16() for name, weight in model.named_parameters()})
    assert sorted(expected_tensors(tmp_path, "bfloat16")) == sorted(trained)


def test_a_tied_head_and_buffers_in_the_files_are_not_expected(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(expected_tensors(tmp_path, "float32")) == sorted(manifest(dict(model.named_parameters())))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != "gpt2")],
)
def test_each_weight_of_any_architecture_is_expected(tmp_path: Path, model_type: str) -> None:
    model = random_model(model_type, SHAPES[model_type])
    model.save_pretrained(tmp_path)
    names = {each.name for each in expected_tensors(tmp_path, "float32")}
    weights = model.named_parameters()
    assert names >= {file_name for name, each in weights for file_name, _ in as_in_files(model, name, each)}


def test_a_damaged_file_of_the_model_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"model\.path = .*model\.safetensors is damaged"):
        expected_tensors(tmp_path, "float32")


def test_a_publication_knows_its_size_and_whether_it_is_sent() -> None:
    assert Weights(1, "/dev/shm/1.safetensors", (A, B)).num_bytes == 24 + 8
    assert Weights(1, "gloo://127.0.0.1:1/?x=1").is_streamed
    assert not Weights(1, "/dev/shm/1.safetensors").is_streamed


def test_settings_of_another_transport_are_refused() -> None:
    settings: TypeAdapter[WeightsSettings] = TypeAdapter(WeightsSettings)
    assert settings.validate_python({}) == SharedMemorySettings()
    with pytest.raises(ValidationError, match="bucket_bytes"):
        settings.validate_python({"transport": "filesystem", "bucket_bytes": 1})


def test_versions_go_to_the_folder_of_the_run_unless_another_one_is_named() -> None:
    run, other = Path("run"), FilesystemSettings(folder=Path("other"))
    assert FilesystemSettings().in_run_folder(run) == FilesystemSettings(
        folder=Path("run/weights").absolute()
    )
    assert other.in_run_folder(run) == other
    assert SharedMemorySettings().in_run_folder(run) == SharedMemorySettings()


async def fails(message: str) -> None:
    await asyncio.sleep(0)
    raise TransferFailed(message)


@pytest.mark.parametrize(
    ("sent", "loaded", "message"), [("trainer", None, "trainer"), ("trainer", "engine", "engine")]
)
def test_a_transfer_fails_with_either_half(sent: str, loaded: str | None, message: str) -> None:
    async def main() -> None:
        await send_and_load(fails(sent), fails(loaded) if loaded else asyncio.sleep(0))

    with pytest.raises(TransferFailed, match=message):
        asyncio.run(main())


def test_when_the_engine_fails_the_trainers_half_is_not_waited_for() -> None:
    async def main() -> None:
        await send_and_load(asyncio.Event().wait(), fails("engine"))  # type: ignore[arg-type]

    with pytest.raises(TransferFailed, match="engine"):
        asyncio.run(main())
