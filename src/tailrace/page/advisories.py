"""What a person should look at, and why: found in the newest rows and spans of a run.

Each is looked for in the last steps or requests, and is gone when they are good again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from tailrace.page.doing import Doing
from tailrace.page.life import EVALUATION, Life, Request
from tailrace.page.state import State
from tailrace.record.figures import CALLS

NUM_STEPS = 5
"""The steps that are looked at."""
NUM_REQUESTS = 200
"""The requests that are looked at for an abort storm."""
MIN_REQUESTS = 20
ABORTED_SHARE, GAINED_SHARE = 0.5, 0.1
"""A storm: at least this share of the requests is aborted, after less than this share of a response."""
ZERO_VARIANCE_SHARE = 0.8
TRUNCATED_SHARE = 0.25
FAILED_SHARE = 0.2
CLOSE_S = 0.1
"""An abort this close to a publication belongs to it."""

StepRow = Mapping[str, float | None]
"""A step's object of metrics.jsonl."""


class Advisory(NamedTuple):
    kind: str
    text: str


def advisories(
    steps: Sequence[StepRow], life: Life | None, state: State | None = None, doing: Sequence[Doing] = ()
) -> list[Advisory]:
    """What the last optimizer steps and the newest life show.

    Args:
        steps: the steps in order; the newest are enough.
        doing: what the life does, or did last.
    """
    recent = steps[-NUM_STEPS:]
    found = [_zero_variance(recent), _truncation(recent), _failures(recent), _no_calls(recent)]
    if life:
        found = [_said(life), *_dead_engines(life), _abort_storm(life, recent), *found]
        found.insert(0, _silent(life, state, doing) if state else None)
    return [each for each in found if each]


def _silent(life: Life, state: State, doing: Sequence[Doing]) -> Advisory | None:
    """A run that ended or hangs, or something in it that takes longer than usual."""
    late = [each.what for each in doing if each.is_late]
    others = [each.what for each in doing if not each.is_late]
    if state.kind == "written" and late:
        beside = ["What else is open:", *others] if others else []
        return Advisory("longer than usual", "\n".join([*late, *beside]))
    if state.kind not in ("ended", "blocked"):
        return None
    last = [work for work in life.trainer if work.name.startswith("step")][-1:]
    text = f"The last record is of {life.end_s:.0f} s"
    text += "".join(f", in {work.name}" for work in life.open_rounds)
    text += "".join(f"; {work.name} had ended at {work.end_s:.0f} s" for work in last)
    then = "\n".join([text + ". What was open then:", *late, *others] if doing else [text + "."])
    if state.kind == "blocked":
        why = "The process lives and writes nothing: it is stopped, or code in it blocks its event loop. "
        return Advisory("stalled", why + then)
    why = "No process holds the run's lock, and the run was not closed: it was killed. "
    return Advisory("ended without closing", why + then)


def _said(life: Life) -> Advisory | None:
    """The run's own alarm."""
    step = next((work for work in reversed(life.trainer) if work.name.startswith("step")), None)
    if not life.waits or (step and life.waits[-1].time_s < step.end_s):
        return None
    wait = life.waits[-1]
    text = f"At {wait.time_s:.0f} s: {wait.name}. What waits for what:\n{wait.what}"
    if life.unfinished:
        oldest = min(life.unfinished, key=lambda request: request.start_s)
        text += f"\nThe oldest request is sample {oldest.sample} on {oldest.engine}, "
        text += f"begun at {oldest.start_s:.0f} s; {len(life.unfinished)} are open."
    return Advisory("stalled", text)


def _dead_engines(life: Life) -> Iterable[Advisory]:
    newest = {state.engine: state for state in life.states}
    for state in newest.values():
        if state.state == "dead":
            yield Advisory("engine dead", f"{state.engine} is dead since {state.time_s:.0f} s: {state.why}")


def _abort_storm(life: Life, steps: Sequence[StepRow]) -> Advisory | None:
    recent: list[Request] = []
    for request in reversed(life.requests):
        if request.outcome != EVALUATION:
            recent.append(request)
        if len(recent) == NUM_REQUESTS:
            break
    aborted = [request for request in recent if request.outcome in ("cancelled", "evicted")]
    if len(recent) < MIN_REQUESTS or len(aborted) < ABORTED_SHARE * len(recent):
        return None
    length = life.num_response_tokens / life.num_responses if life.num_responses else None
    gained = fmean(request.tokens - request.had for request in aborted)
    if length and gained >= GAINED_SHARE * length:
        return None
    text = (
        f"{len(aborted)} of the last {len(recent)} requests were aborted, after {gained:.0f} tokens in the "
    )
    text += f"mean{f' of {length:.0f} in a response' if length else ''}: {_why_aborted(life, aborted)}"
    for engine, num in _sums(steps, "engines/preempted/").items():
        text += f"; the KV cache of {engine} was full for {num:.0f} requests in {_last(steps)}"
    return Advisory("abort storm", text)


def _why_aborted(life: Life, aborted: Sequence[Request]) -> str:
    evicted = [request.engine for request in aborted if request.outcome == "evicted"]
    if 2 * len(evicted) >= len(aborted):
        (engine, num), *_ = Counter(evicted).most_common(1)
        why = [state.why for state in life.states if state.engine == engine and state.state != "open"]
        return f"{engine} gave {num} of them back" + (f" ({why[-1]})" if why and why[-1] else "")
    near = [
        request
        for request in aborted
        if any(p.start_s - CLOSE_S <= request.end_s <= p.end_s + CLOSE_S for p in life.publications)
    ]
    if 2 * len(near) >= len(aborted):
        return f"publications of weights stopped {len(near)} of them"
    return "the schedule stopped them: it parks or discards what it launched"


def _zero_variance(steps: Sequence[StepRow]) -> Advisory | None:
    share = _mean(steps, "frac_reward_zero_std")
    filtered = _sums(steps, "groups/filtered/").get("zero_variance", 0.0)
    trained = sum(row.get("groups/trained") or 0.0 for row in steps)
    if filtered:
        share = (share * trained + filtered) / (trained + filtered)
    if not steps or share < ZERO_VARIANCE_SHARE:
        return None
    text = f"In {share:.0%} of the groups of {_last(steps)} all rewards are equal, so they teach "
    text += f"nothing. The mean reward is {_mean(steps, 'reward'):g}: "
    if all((row.get("reward_std") or 0.0) == 0.0 and not row.get("reward") for row in steps):
        why = "no sample is right. The prompts are too hard, or the reward function recognises no answer"
    elif _mean(steps, "reward") > 0:
        why = "most groups are all right or all wrong. Use prompts of middling difficulty"
    else:
        why = "most groups get the same reward. Look at the reward function and at the prompts"
    return Advisory("groups without variance", text + why + ".")


def _truncation(steps: Sequence[StepRow]) -> Advisory | None:
    share = _mean(steps, "completions/clipped_ratio")
    if not steps or share < TRUNCATED_SHARE:
        return None
    longest = max(row.get("completions/max_length") or 0.0 for row in steps)
    text = f"{share:.0%} of the samples of {_last(steps)} end at the length limit "
    text += f"({longest:.0f} tokens): their rewards are those of unfinished answers. "
    return Advisory("truncation", text + "Raise sampling.max_completion_tokens, or shorten the answers.")


def _failures(steps: Sequence[StepRow]) -> Advisory | None:
    failed = _sums(steps, "completions/failed/")
    samples = sum(row.get("samples/trained") or 0.0 for row in steps)
    num = sum(failed.values())
    if not num or num < FAILED_SHARE * (num + samples):
        return None
    reason = max(failed, key=lambda name: failed[name])
    text = f"{num:.0f} samples of {_last(steps)} have no reward, most by: {reason}"
    return Advisory("rewards fail", text)


def _no_calls(steps: Sequence[StepRow]) -> Advisory | None:
    if not steps or any(row.get(f"rewards/{CALLS}") != 0.0 for row in steps):
        return None
    text = (
        f"No sample of {_last(steps)} calls a tool. Either the model does not know the tools, or it writes "
    )
    return Advisory("no calls", text + "calls in another format than environment.parser: look at samples.")


def _last(steps: Sequence[StepRow]) -> str:
    return f"the last {len(steps)} steps" if len(steps) > 1 else "the last step"


def _mean(steps: Sequence[StepRow], key: str) -> float:
    values = [value for row in steps if (value := row.get(key)) is not None]
    return fmean(values) if values else 0.0


def _sums(steps: Sequence[StepRow], prefix: str) -> Mapping[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for row in steps:
        for key, value in row.items():
            if key.startswith(prefix) and value:
                sums[key.removeprefix(prefix)] += value
    return sums
