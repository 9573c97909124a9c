"""RollPacker's judge on the rollout devices (section 4.3): its memory, and what it and the actor cost each
other."""

from pathlib import Path
from typing import Literal

from tailrace.contracts.memory import MIB
from tailrace.extras.judges.memory import IN_TRANSIT, LayerBudget
from tailrace.extras.judges.settings import LocalJudgeSettings
from tailrace.sim.cluster import MODELS
from tailrace.sim.engine import Steps
from tailrace.sim.settings import SimEngineSettings, SimHostSettings, SimJudgeSettings

JUDGE = "Qwen2.5-7B"
"""Qwen2.5-7B-Instruct (section 6)."""
RESIDENT = 0.5
"""Share of its layers on the device at the maximum length: "at least half" are offloaded (section 6.5)."""

Sharing = Literal["time slices", "mps"]
"""Time slices: judge and actor compute in turn. MPS: at the same time."""


def judge_of(longest: int, resident: float = RESIDENT) -> SimJudgeSettings:
    """Return the judge.

    Args:
        longest: tokens of a prompt with its longest response.
        resident: share of its layers that stay on the device beside the longest text.
    """
    whole = LayerBudget.of(MODELS[JUDGE], LocalJudgeSettings(path=Path(JUDGE), dtype="bfloat16"))
    layers = int(resident * whole.num_layers) + IN_TRANSIT
    memory = -(-(whole.outside_bytes + longest * whole.token_bytes + layers * whole.layer_bytes) // MIB)
    return SimJudgeSettings(model=JUDGE, memory_mib=memory, max_tokens=longest)


def interference(
    sharing: Sharing, engine: SimEngineSettings, num_running: int, tokens: float
) -> SimHostSettings:
    """Return how much judge and actor slow each other down.

    In time slices each has half of the time. With MPS they divide the arithmetic units only: decoding needs
    the share e of them, and the judge gets the rest, or each gets half. The bandwidth that a judge needs is
    left out.

    Args:
        engine: with all its rates.
        num_running: requests of an engine.
        tokens: mean length of a sequence.
    """
    if sharing == "time slices":
        return SimHostSettings(judge_slowdown=2.0, judged_slowdown=2.0)
    step_s = Steps.of(engine, num_running, int(num_running * tokens)).first_s
    arithmetic = engine.compute_s * num_running / step_s
    return SimHostSettings(
        judge_slowdown=max(1.0, 2 * arithmetic), judged_slowdown=1 / (1 - min(0.5, arithmetic))
    )
