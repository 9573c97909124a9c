"""Processes that divide the layers of a model compute what one process does, or the architecture is refused.

A start of so many processes walks through all architectures.
"""

import json
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from transformers import CONFIG_MAPPING

from helpers.architectures import SHAPES, VOCABULARY, random_model
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer import plans, tensor_parallel
from tailrace.drivers.trainer.batch import AdamStep, TrainingSample
from tailrace.drivers.trainer.distributed import Ranks, gather, joined, listen
from tailrace.drivers.trainer.equality import TOLERANCE, Equality, relative_errors
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.optimizer import Optimizer
from tailrace.drivers.trainer.plans import check_tensor_parallel
from tailrace.drivers.workers.process import preload
from tailrace.errors import ConfigError
from tailrace.types import SampleId

HOST = "127.0.0.1"
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "olmo2",
    "phi3",
    "cohere",
    "qwen3_moe",
    "mixtral",
)
"""Scaled logits, biases, norms of heads and of all heads, packed matrices, tied embeddings, experts."""
ADAM = AdamStep(learning_rate=1e-3, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.1, max_grad_norm=1.0)
"""Its epsilon is above the rounding of gradients that are nearly zero."""


def samples() -> list[TrainingSample]:
    """Three of 60 completion tokens, which are a micro-batch each."""
    ids = torch.randint(3, VOCABULARY, (3, 80), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        TrainingSample(SampleId(i, 0, 0), each[:20], each[20:], [0.0] * 60, 0.0) for i, each in enumerate(ids)
    ]


def trained(family: str, ranks: Ranks | None, layout: Mapping[str, int]) -> dict[str, Any]:
    """Three optimizer steps: loss, entropy and gradients of the first, the norms, the weights after them."""
    settings = TrainerSettings(max_tokens_per_microbatch=85, **layout)
    policy = PolicyModel(
        random_model(family, SHAPES[family]), settings, temperature=0.8, ranks=ranks or Ranks()
    )
    optimizer = Optimizer(policy.parameters(), settings)
    found: dict[str, Any] = {"norms": []}
    for step in range(3):
        sums = torch.zeros(2)
        for batch in policy.own_micro_batches(samples()):
            logprobs, entropy = policy.logprobs(batch)
            loss = (logprobs * (0 if batch.is_filler else torch.linspace(-1, 1, len(logprobs)))).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([loss.detach(), entropy.sum() * (not batch.is_filler)])
        (ranks or Ranks()).sum_over_shards(sums)
        if step == 0:
            found["sums"] = sums
            found["gradients"] = {n: gather(p.grad).clone() for n, p in policy.parameters().items()}  # type: ignore[arg-type]
        found["norms"].append(optimizer.step(1, ADAM))
    found["weights"] = {name: gather(each).clone() for name, each in policy.parameters().items()}
    return found


def walk(number: int, port: int, num_ranks: int, folder: Path) -> None:
    """Train all families, as one of the processes, and leave what was found, or the traceback."""
    torch.set_num_threads(1)
    layout = {"ranks": num_ranks, "tensor_parallel": 2}
    settings = TrainerSettings(**layout, collective_timeout_s=300)
    found: dict[str, Any] = {}
    try:
        store = TCPStore(HOST, port, is_master=False)
        with joined(settings, store, replica=0, rank=number) as ranks:
            for family in FAMILIES:
                found[family] = trained(family, ranks, layout)
                random_model(family, SHAPES[family]).config.save_pretrained(folder / f"{number}" / family)
                Equality.check(folder / f"{number}" / family, settings, ranks)
            if num_ranks == 1:
                # transformers' own style sums what several micro-batches accumulated.
                tensor_parallel.SUMMED = "replicated_with_grad_allreduce"
                with pytest.raises(ConfigError) as refused:
                    Equality.check(folder / f"{number}" / "qwen3", settings, ranks)
                found["refused"] = str(refused.value)
    except BaseException:
        (folder / f"{number}.error").write_text(traceback.format_exc())
        raise
    torch.save(found, folder / f"{number}.pt")


@pytest.fixture(scope="module", params=[1, 2])
def walked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, in 1x2 and 2x2."""
    folder, store = tmp_path_factory.mktemp("walk"), listen(HOST)
    preload()
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=walk, args=(number, store.port, request.param, folder))
        for number in range(2 * request.param)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    errors = [path.read_text() for path in folder.glob("*.error")]
    assert [process.exitcode for process in processes] == [0] * len(processes), errors
    return [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(len(processes))]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_is_trained_as_by_one_process(walked: list[dict[str, Any]], family: str) -> None:
    wanted = trained(family, None, {})
    loss, entropy = wanted["sums"].tolist()
    for found in (each[family] for each in walked):
        errors = relative_errors((float(found["sums"][0]), found["gradients"]), (loss, wanted["gradients"]))
        assert max(errors.values()) < TOLERANCE, errors
        assert float(found["sums"][1]) == pytest.approx(entropy, rel=1e-5)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, wanted["weights"][name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("walked", [1], indirect=True)
def test_a_wrong_gradient_is_refused_before_a_model_is_loaded(walked: list[dict[str, Any]]) -> None:
    for found in walked:
        assert found["refused"].startswith("trainer.tensor_parallel = 2: model.layers.")
        assert "k_norm.weight of a small copy of the model differs by " in found["refused"]


@pytest.mark.slow
def test_the_plan_that_is_read_from_a_source_is_that_of_the_class() -> None:
    """Of 118 architectures with a plan; one inherits a part of it."""
    wanted = {}
    for kind in CONFIG_MAPPING:
        with suppress(ImportError):  # timm
            wanted[kind] = CONFIG_MAPPING[kind].base_model_tp_plan
    found = {kind: plans.plan_of(kind) for kind in wanted}
    assert sum(map(bool, found.values())) >= 100
    assert {kind for kind in wanted if found[kind] != wanted[kind]} <= {"hrm_text"}


def test_torch_is_not_imported_for_the_check_of_a_plan(tmp_path: Path) -> None:
    """Torch in the controller would also set variables, and each worker would import torch again."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tailrace.drivers.trainer.plans import check_tensor_parallel, plan_of\n"
        f"check_tensor_parallel(Path({str(folder_of(tmp_path, 'qwen3'))!r}), 2)\n"
        "print(plan_of('qwen3')['layers.*.mlp.down_proj'], 'torch' in sys.modules)"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.split() == ["rowwise", "False"]


def folder_of(path: Path, kind: str, **sizes: int) -> Path:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    (path / "config.json").write_text(json.dumps({"model_type": kind, **shape, **sizes}))
    return path


@pytest.mark.parametrize("kind", ["gpt2", "gpt_oss", "lfm2", "mamba", "unheard_of"])
def test_an_architecture_without_a_plan_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    problem = f"trainer.tensor_parallel = 2: transformers has no plan for an architecture of type '{kind}'"
    with pytest.raises(ConfigError, match=problem):
        check_tensor_parallel(folder_of(tmp_path, kind), 2)
    check_tensor_parallel(folder_of(tmp_path, kind), 1)


@pytest.mark.parametrize(
    ("kind", "style"), [("deepseek_v2", "mla_kv_a_proj"), ("llama4_text", "packed_rowwise")]
)
def test_styles_that_are_not_tested_are_refused_by_name(tmp_path: Path, kind: str, style: str) -> None:
    with pytest.raises(ConfigError, match=f"of type '{kind}' has layers .*{style}"):
        check_tensor_parallel(folder_of(tmp_path, kind), 2)


@pytest.mark.parametrize(
    ("num", "sizes", "problem"),
    [
        (8, {}, "it does not divide num_attention_heads = 12, num_key_value_heads = 4; choose from 1, 2, 4"),
        (3, {}, "it does not divide num_key_value_heads = 4; choose from 1, 2, 4"),
        (4, {"vocab_size": 6}, "vocab_size = 6 leaves a process without a part"),
        (4, {"intermediate_size": 50}, "it does not divide intermediate_size = 50; choose from 1, 2"),
        (4, {"moe_intermediate_size": 6}, "it does not divide moe_intermediate_size = 6; choose from 1, 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    tmp_path: Path, num: int, sizes: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_tensor_parallel(folder_of(tmp_path, "llama", **sizes), num)
    check_tensor_parallel(folder_of(tmp_path, "llama"), 4)


def test_an_older_transformers_is_refused_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "version", lambda name: "5.18.1")
    with pytest.raises(ConfigError, match=r"transformers 5\.18\.1 has plans of another form"):
        check_tensor_parallel(folder_of(tmp_path, "llama"), 2)


def test_experts_are_refused_where_torch_does_not_gather_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "version", {"transformers": "5.19.0", "torch": "2.11.0+cpu"}.__getitem__)
    check_tensor_parallel(folder_of(tmp_path, "qwen3"), 2)
    with pytest.raises(ConfigError, match=r"torch 2\.11\.0\+cpu does not gather the packed matrices"):
        check_tensor_parallel(folder_of(tmp_path, "qwen3_moe"), 2)
