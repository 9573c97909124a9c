"""The least time of an optimizer step, from the rates of a set-up and the lengths of its responses.

Decode steps that an engine needs for its share of the tokens of an optimizer step, at least:

    tokens / batch                       the batch is limited by slots and KV cache
    groups * longest of a group / alive  a group is alive until its longest response ends (Little's law)
    longest that the step waits for      in a schedule that waits for it

Each step reads the weights, and each token adds its own part, so the time of generation is closed
(sim/engine.py). A schedule whose engines stop also waits for a reward. Left out are prefills, preemptions,
waits for a bound on staleness, and that engines drain at different times: they only add to it.
"""

from tailrace.plan.base import Candidate, Floor
from tailrace.plan.workload import Workload
from tailrace.sim.settings import SimEngineSettings, SimSettings


def floor(candidate: Candidate, sim: SimSettings, load: Workload, groups_per_step: int) -> Floor:
    """Return the least time of one optimizer step.

    Args:
        sim: of the candidate, with its rates.
    """
    work, engines, trainer = candidate.work, sim.engines, sim.trainer
    samples = groups_per_step * len(load.groups[0])
    alive_steps = groups_per_step * load.longest_of_group / work.alive
    busy_s = generation_seconds(engines, load, samples, alive_steps)
    waited_steps = max(alive_steps, work.waited_tokens(load))
    generation_s = generation_seconds(engines, load, samples, waited_steps)
    pass_s = samples * (load.mean_tokens + load.prompt_tokens) / trainer.tokens_per_s
    last_s, others_s = trainer.step_s / work.steps, trainer.step_s * (work.steps - 1) / work.steps
    publish_s, load_s = trainer.publish_s / work.steps, engines.load_s / work.steps
    reward_s = sim.rewards.median_s / work.steps if sim.rewards.code is None else 0.0
    switch_s = (engines.sleep_s + engines.wake_s) / work.steps
    match candidate.kind:
        case "colocated":
            step_s = generation_s + reward_s + pass_s + others_s + last_s + publish_s + switch_s
        case "elastic":  # the devices of engines that are idle train
            step_s = max(generation_s + reward_s, busy_s + pass_s) + others_s + last_s + publish_s + switch_s
        case "disaggregated" if work.stops:
            step_s = max(generation_s + reward_s, pass_s + others_s) + last_s + publish_s + load_s
        case "disaggregated":
            step_s = max(generation_s + load_s, pass_s + others_s + last_s + publish_s)
    return Floor(generation_s, pass_s + trainer.step_s, step_s)


def generation_seconds(cost: SimEngineSettings, load: Workload, samples: int, steps: float) -> float:
    """Return the least time in which the engines generate some samples.

    Args:
        steps: decode steps that are needed at least, whatever the batch.
    """
    count = cost.count or 1
    tokens = samples * load.mean_tokens / count
    room = max(1.0, cost.kv_tokens / load.mean_context)
    steps = max(steps, tokens / min(cost.slots or room, room))
    base_s = max(cost.base_s * steps, cost.compute_s * tokens)
    return cost.overhead_s * steps + base_s + (cost.slope_s + cost.context_s * load.mean_context) * tokens
