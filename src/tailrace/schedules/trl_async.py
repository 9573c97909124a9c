"""TRL (von Werra et al. 2020): AsyncGRPOTrainer with LoRA, pull request 7017 of huggingface/trl.

    max_loras >= max_staleness + 1 adapters stay loaded       engine.versions
    a rollout that began under an older policy ends under it  run.declare(pinned=...)
    every engine gets every adapter                           run.publish

We read the documentation and the review of the pull request. TRL 1.18 holds generation to max_staleness;
here the selection of the groups keeps the bound. Without LoRA, TRL loads the weights in flight: `tailrace`.
"""

from tailrace.controller.run import Run
from tailrace.schedules.parameters import Bound, Count
from tailrace.schedules.window import in_flight


async def trl_async(run: Run, groups_per_step: Count, groups_in_flight: Count, staleness: Bound) -> None:
    """Each engine serves the last staleness + 1 versions, and a sample keeps its own.

    Args:
        groups_per_step, groups_in_flight, staleness: as in tailrace. `staleness` is TRL's max_staleness.
    """
    await in_flight(run, groups_per_step, groups_in_flight, staleness, pinned=staleness + 1)
