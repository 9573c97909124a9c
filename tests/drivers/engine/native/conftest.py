"""Model folders are made once; engines with their settings are made by each test. `make test-slow` runs each
test also with drafts that are forced on the engine, whether they are right or not, and with its decode steps
in graphs that copy keys and values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forced_drafts import KINDS, OF_STEPS, ForcedDrafts
from native_cases import TEMPERATURE
from replayed_graphs import GRAPHS, OF_KERNELS, Replayed
from transformers import PreTrainedModel

from helpers.tiny_models import FAMILIES, save_tiny_model
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings

MakeEngine = Callable[..., NativeEngine]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without drafts, and with each kind of them where the test asks for engines and counts no steps."""
    if "make_engine" in metafunc.fixturenames:
        names = {metafunc.function.__name__, metafunc.module.__name__}
        kinds = () if names & {*OF_STEPS} else KINDS
        forced = [pytest.param(kind, marks=pytest.mark.slow, id=f"{kind} drafts") for kind in kinds]
        forced += [] if names & {*OF_KERNELS} else [pytest.param(GRAPHS, marks=pytest.mark.slow)]
        metafunc.parametrize("forced", [pytest.param(None, id=pytest.HIDDEN_PARAM), *forced])


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """By family: the folder, and the model that transformers runs."""
    root = tmp_path_factory.mktemp("models")
    return {family: (root / family, save_tiny_model(root / family, family)) for family in FAMILIES}


@pytest.fixture
def make_engine(models: dict[str, tuple[Path, PreTrainedModel]], forced: str | None) -> MakeEngine:
    def make(
        family: str = "qwen3",
        settings: NativeEngineSettings | None = None,
        sampling: SamplingSettings | None = None,
        max_completion_tokens: int = 60,
        **of_adapters: float,
    ) -> NativeEngine:
        engine = NativeEngine(
            models[family][0],
            settings or NativeEngineSettings(),
            sampling
            or SamplingSettings(max_completion_tokens=max_completion_tokens, temperature=TEMPERATURE),
            **of_adapters,
        )
        if forced == GRAPHS:
            engine._graphs = Replayed(engine._model, engine._cache, 128)
        elif forced:
            engine._drafter = ForcedDrafts(forced, engine)
        return engine

    return make
