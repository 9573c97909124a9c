"""Several processes make the step of one: sharded models, divided layers, replicas, and checkpoints across
sizes.

Two processes are started for the layouts of every change, and four for the others, which are slow. They join
in one layout after another, and each layout runs its cases.
"""

import math
import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore
from trainer_cases import VOCABULARY, make_torch_trainer, make_units
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tailrace.contracts.trainer import StepStats, TrainerSettings
from tailrace.drivers.trainer.distributed import Ranks, joined, listen
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.drivers.workers.process import preload
from tailrace.errors import CheckpointError, ScheduleError

HOST = "127.0.0.1"
UNITS = make_units(6)
CALLS = [
    ([[0], [1, 2]], [[3]]),  # two calls of replica 0, and one of replica 1
    ([[4]], []),  # replica 1 has nothing
    ([], [[5]]),
]
"""The units of each step, by replica and call."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "token means": {},
    "sample means": {"normalize": "sample_mean", "max_grad_norm": 1e-3},
    "checkpointed, offloaded": {"activation_checkpointing": True, "cpu_offload": True},
    "old policy": {"old_policy": "recomputed", "min_tokens_per_microbatch": 1},
    "critic": {"advantage": "gae", "old_policy": "recomputed"},
    "bfloat16": {"dtype": "bfloat16", "advantage": "gae"},
    "experts": {},
    "low rank": {"lora": {"rank": 4, "alpha": 8.0}, "activation_checkpointing": True},
    "adapter alone": {"lora": {"rank": 4, "publish": "adapter"}, "old_policy": "recomputed"},
}
"""Settings of the trainer or of the algorithm."""


class Layout(NamedTuple):
    ranks: int
    replicas: int
    tensor_parallel: int = 1

    @property
    def num_processes(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        return "x".join(map(str, self))


FSDP, DIVIDED = Layout(2, 1), Layout(1, 1, 2)
LAYOUTS: Mapping[Layout, Sequence[str]] = {
    FSDP: ["token means", "critic", "bfloat16", "experts", "low rank"],
    DIVIDED: ["token means", "critic", "bfloat16", "experts", "low rank", "old policy", "adapter alone"],
    Layout(4, 1): ["sample means", "checkpointed, offloaded"],
    Layout(1, 2): ["token means", "old policy"],
    Layout(2, 2): ["token means", "sample means", "checkpointed, offloaded", "old policy", "adapter alone"],
    Layout(2, 1, 2): ["token means", "checkpointed, offloaded", "critic", "bfloat16", "experts", "low rank"],
    Layout(1, 2, 2): ["sample means", "adapter alone"],
}
"""The cases of each layout."""
SLOW = tuple(layout for layout in LAYOUTS if layout.num_processes > 2)
"""Layouts that `make test` leaves to `make test-slow`: two cores run four processes in turn."""
ON_DISK = dict.fromkeys(("weights", "gradients", "optimizer"), "disk")
ALONE = Layout(1, 1)
RESUMED = {
    (ALONE, "2x1x1", "critic"),
    (ALONE, "1x1x2", "critic"),
    (ALONE, "1x1x2", "experts"),
    (ALONE, "2x1x2", "experts"),
    (FSDP, "alone", "critic"),
    (DIVIDED, "2x1x1", "critic"),
    (DIVIDED, "2x1x1", "experts"),
    (Layout(4, 1), "2x1x1", "critic"),
    (Layout(2, 1, 2), "1x1x2", "critic"),
    (Layout(2, 1, 2), "2x1x2", "experts"),
}
"""Layouts, and whose checkpoint of which case each resumes from."""


class Outcome(NamedTuple):
    stats: list[StepStats]
    ess: float
    weights: dict[str, Tensor]


def make(models: Mapping[str, Path], case: str, place: Ranks | None = None, **layout: int) -> TorchTrainer:
    settings = {"max_tokens_per_microbatch": 48, "learning_rate": 1e-3, **CASES[case], **layout}
    return make_torch_trainer(models["moe" if case == "experts" else "tied"], place=place, **settings)


def run(trainer: TorchTrainer, replicas: list[int], folder: Path, *, sleeps: bool = False) -> Outcome:
    """Three steps, of what these replicas are given. A checkpoint of the first one is written beside the
    others. `sleeps`: between any two calls."""
    stats, writer = [], None
    for step, shares in enumerate(CALLS):
        for replica in replicas:
            for call in shares[replica]:
                if sleeps:
                    trainer.sleep()
                    trainer.wake(early=True)
                trainer.accumulate([UNITS[index] for index in call])
        if sleeps:
            trainer.sleep()
            trainer.wake()
        stats.append(trainer.step())
        if step == 0 and 0 in replicas:
            writer = ThreadPoolExecutor(1).submit(trainer.save(folder))
    ess = trainer.ess(UNITS[:2])
    if writer:
        writer.result()
    assert trainer.logprobs(UNITS[0][0]) == trainer.logprobs(UNITS[0][0])
    return Outcome(stats, ess, {name: tensor.clone() for name, tensor in trainer.export_weights()})


def told(number: int, ports: Mapping[Layout, int], models: Mapping[str, Path], folder: Path) -> None:
    """Work, and leave the traceback of an error."""
    try:
        work(number, ports, models, folder)
    except BaseException:
        (folder / f"{number}.error").write_text(traceback.format_exc())
        raise


def work(number: int, ports: Mapping[Layout, int], models: Mapping[str, Path], folder: Path) -> None:
    torch.set_num_threads(1)
    for layout, port in ports.items():
        if number >= layout.num_processes:
            continue
        replica, rank = divmod(number, layout.num_processes // layout.replicas)
        sizes = layout._asdict()
        settings = TrainerSettings(**sizes, collective_timeout_s=120)
        store = TCPStore(HOST, port, is_master=False)
        outcomes = {}
        with joined(settings, store, replica=replica, rank=rank) as ranks:
            for case in LAYOUTS[layout]:
                trainer = make(models, case, ranks, **sizes)
                own = [0, 1] if layout.replicas == 1 else [replica]
                outcomes[case] = run(trainer, own, folder / f"{layout} {case}")
            if layout in (FSDP, DIVIDED):
                trainer = make(models, "token means", ranks, **sizes, offload=ON_DISK)
                outcomes["slept"] = run(trainer, [0, 1], folder / f"{layout} slept", sleeps=True)
            for saved, case in [own for resuming, *own in sorted(RESUMED) if resuming == layout]:
                trainer = make(models, case, ranks, **sizes)
                with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
                    trainer.restore(folder / "nowhere")
                with pytest.raises(ScheduleError, match="nothing was accumulated"):
                    trainer.step()
                outcomes[f"{case} resumed"] = resume(trainer, folder / f"{saved} {case}")
        torch.save(outcomes, folder / f"{layout} {number}.pt")


def resume(trainer: TorchTrainer, folder: Path) -> Outcome:
    trainer.restore(folder)
    trainer.accumulate([UNITS[4]])
    return Outcome([trainer.step()], 0.0, dict(trainer.export_weights()))


@pytest.fixture(scope="module")
def models(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with tied embeddings, and one of experts without and with unequal shards."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY + 1, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    moe = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(moe)
    (moe / "tokenizer.json").write_text("{}")
    return {"tied": model_path, "moe": moe}


Alone = Callable[[str], Outcome]
"""The outcome of a case in one process. It leaves a checkpoint."""


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], folder: Path) -> Alone:
    return cache(lambda case: run(make(models, case), [0, 1], folder / f"alone {case}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


Together = Mapping[Layout, list[dict[str, Outcome]]]
"""The outcomes of every process, by layout."""


@pytest.fixture(scope="module")
def together(models: dict[str, Path], alone: Alone, folder: Path) -> Together:
    assert alone("critic") and alone("experts")
    return outcomes_of([layout for layout in LAYOUTS if layout not in SLOW], models, folder)


@pytest.fixture(scope="module")
def slowly(models: dict[str, Path], together: Together, folder: Path) -> Together:
    """Those of the slow layouts; one resumes from a checkpoint of the others."""
    return outcomes_of(SLOW, models, folder)


def outcomes_of(layouts: Sequence[Layout], models: dict[str, Path], folder: Path) -> Together:
    stores = {layout: listen(HOST) for layout in layouts}
    preload()  # its processes have no output
    context = multiprocessing.get_context("forkserver")
    ports = {layout: store.port for layout, store in stores.items()}
    num_processes = max(layout.num_processes for layout in layouts)
    processes = [context.Process(target=told, args=(n, ports, models, folder)) for n in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    errors = [path.read_text() for path in folder.glob("*.error")]
    assert [process.exitcode for process in processes] == [0] * num_processes, errors
    return {
        layout: [
            torch.load(folder / f"{layout} {n}.pt", weights_only=False) for n in range(layout.num_processes)
        ]
        for layout in layouts
    }


def marked(layout: Layout, *others: object) -> Any:
    """A parameter of a test, slow where the layout is, with the fixture that has its outcomes."""
    slow = layout in SLOW or not {*map(str, SLOW)}.isdisjoint(others)
    fixture = "slowly" if slow else "together"
    return pytest.param(fixture, layout, *others, marks=[pytest.mark.slow] if slow else [])


def assert_equal(got: Outcome, wanted: Outcome, tolerance: float) -> None:
    near = partial(pytest.approx, rel=tolerance, abs=tolerance)
    for stats, expected in zip(got.stats, wanted.stats, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "clip_ratio", "ess", "value_loss"):
            assert getattr(stats, name) == near(getattr(expected, name)), name
        assert (stats.num_tokens, stats.num_steps) == (expected.num_tokens, expected.num_steps)
    assert got.ess == near(wanted.ess)
    assert got.weights.keys() == wanted.weights.keys()
    for name, weight in got.weights.items():
        torch.testing.assert_close(weight, wanted.weights[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("fixture", "layout", "case"),
    [marked(layout, case) for layout, cases in LAYOUTS.items() for case in cases],
)
def test_many_processes_make_the_steps_of_one(
    request: pytest.FixtureRequest, alone: Alone, fixture: str, layout: Layout, case: str
) -> None:
    tolerance = 3e-2 if case == "bfloat16" else 1e-5
    for outcomes in request.getfixturevalue(fixture)[layout]:
        assert_equal(outcomes[case], alone(case), tolerance)


@pytest.mark.parametrize("layout", [FSDP, DIVIDED])
def test_ranks_that_sleep_between_calls_train_the_same_bits(together: Together, layout: Layout) -> None:
    for outcomes in together[layout]:
        slept, awake = outcomes["slept"], outcomes["token means"]
        assert [stats.grad_norm for stats in slept.stats] == [stats.grad_norm for stats in awake.stats]
        assert all(torch.equal(slept.weights[name], awake.weights[name]) for name in awake.weights)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("case", ["token means", "experts"])
def test_weights_are_published_with_the_names_of_the_files(
    alone: Alone, models: dict[str, Path], folder: Path, case: str
) -> None:
    names = load_file(models["moe" if case == "experts" else "tied"] / "model.safetensors").keys()
    assert alone(case).weights.keys() == names
    assert load_file(folder / f"{FSDP} {case}" / "model.safetensors").keys() == names


@pytest.mark.parametrize(("fixture", "layout", "saved", "case"), [marked(*each) for each in sorted(RESUMED)])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    folder: Path,
    fixture: str,
    layout: Layout,
    saved: str,
    case: str,
) -> None:
    together = request.getfixturevalue(fixture)
    wanted = resume(make(models, case), folder / f"alone {case}")
    if layout == ALONE:
        got = [resume(make(models, case), folder / f"{saved} {case}")]
    else:
        got = [outcomes[f"{case} resumed"] for outcomes in together[layout]]
    for outcome in got:
        assert_equal(outcome, wanted, 1e-5)


def test_an_adapter_of_two_ranks_is_resumed_by_one_process(
    together: Together, alone: Alone, models: dict[str, Path], folder: Path
) -> None:
    assert together[FSDP] and together[DIVIDED] and alone("low rank")
    *got, wanted = (
        resume(make(models, "low rank"), folder / f"{saved} low rank") for saved in (FSDP, DIVIDED, "alone")
    )
    for each in got:
        assert_equal(each, wanted, 1e-5)
