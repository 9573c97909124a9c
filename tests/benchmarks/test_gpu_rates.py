"""Rates beside the limits of a device: the arithmetic of the limits, and each row with a tiny shape."""

import json
from pathlib import Path

import pytest
import torch

from gpu_rates import BESIDE, REQUESTS, SHAPES, STEPS, main, nano_vllm
from limits import (
    Card,
    card,
    generation_s,
    head_parameters,
    layer_parameters,
    pair_operations,
    training_s,
)
from tailrace.contracts.memory import ModelShape

MODEL = ModelShape(3400, 2, 10, 4, 2, 5, 20, 100, 64)
"""2 layers of 10 x (4 + 2 + 2 + 4) x 5 and 3 x 10 x 20 weights; a head of 1,000."""


def test_parameters_operations_and_bytes_of_a_shape_by_hand() -> None:
    assert (layer_parameters(MODEL), head_parameters(MODEL)) == (2 * (600 + 600), 1000)
    assert pair_operations(MODEL) == 2 * 2 * 2 * 4 * 5, "scores and values; 2 layers, 4 heads of 5"
    assert MODEL.kv_bytes(2) == 2 * 2 * 2 * 2 * 5, "keys and values of 2 bytes; 2 layers, 2 heads of 5"


def test_the_published_shapes_have_the_parameters_of_their_names() -> None:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("intermediate_size", "vocab_size", "max_position_embeddings")
    sizes = {name: ModelShape(0, *(each[key] for key in keys)) for name, each in SHAPES.items()}
    found = {
        name: round((layer_parameters(each) + head_parameters(each)) / 1e8) for name, each in sizes.items()
    }
    assert found == {"0.6B": 6, "1.5B": 15, "4B": 40}


def test_a_training_step_is_bound_by_arithmetic_or_by_bandwidth() -> None:
    groups = [(4, [2, 6])]
    products = 2 * (12 * 2400 + 8 * 1000)
    attention = 160 * (8 + 2 * 4 + 2 + 6 * 4 + 18)
    slow, narrow = Card("", 1e30, 1.0), Card("", 1.0, 1e30)
    assert training_s(MODEL, slow, groups, lora=False) == 3 * (products + attention)
    assert training_s(MODEL, slow, groups, lora=True) == 2 * products + 3 * attention
    assert training_s(MODEL, narrow, groups, lora=False) == (4 + 28) * 3400
    assert training_s(MODEL, narrow, groups, lora=True) == 4 * 3400


def test_generation_reads_the_weights_in_each_step_and_the_cache_of_those_that_still_run() -> None:
    requests = [(3, 1), (2, 3)]
    slow, narrow = Card("", 1e30, 1.0), Card("", 1.0, 1e30)
    assert generation_s(MODEL, narrow, requests) == 3 * 6800 + 80 * (5 + 3 + 4)
    prefill = 2 * (5 * 2400 + 2 * 1000) + 160 * (4.5 + 2)
    steps = 2 * 2 * 3400 + 160 * (3 + 4)
    assert generation_s(MODEL, slow, requests) == prefill + steps


def test_a_device_that_is_not_in_the_table_is_measured() -> None:
    own = card("cpu")
    assert own.name == "cpu (measured)"
    assert 1e8 < own.bandwidth < 1e13 and 1e8 < own.arithmetic < 1e14


def test_a_known_card_has_its_vendors_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"]
    figures = []
    for name in names:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        figures.append(card("cuda")[1:])
    assert figures == [(4.8e12, 989.4e12), (3.35e12, 989.4e12), (2.0e12, 756e12), (2.039e12, 312e12)]


def test_the_requests_are_those_of_nano_vllms_script() -> None:
    assert len(nano_vllm()) == 256 and sum(length for _, length in nano_vllm()) == 133_966


def test_each_row_runs_with_a_tiny_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(repeats=1, json=tmp_path / "rates.json", shape="tiny")
    rows = json.loads((tmp_path / "rates.json").read_text())["rows"]
    engines = {f"native, {name}" for name in REQUESTS} | {f"transformers, {name}" for name in BESIDE}
    assert rows.keys() == engines | {f"trainer, {name}" for name in STEPS}
    for row in rows.values():
        assert row["share"] == pytest.approx(row["tokens_s"] / row["limit_tokens_s"]) and row["share"] > 0
    assert "prime-rl, H100: 4,160" in capsys.readouterr().out


def test_a_word_that_no_row_has_is_refused() -> None:
    with pytest.raises(SystemExit, match="no row has 'nothing' in its name"):
        main(only="nothing", shape="tiny")
