"""The judges of a live run, and their checks."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tailrace import clock
from tailrace.config import RunConfig
from tailrace.data.base import MixedSettings, sources_of
from tailrace.devices import check_device
from tailrace.errors import ConfigError
from tailrace.reward.base import Call, Rewards, RewardSettings, check_sources
from tailrace.reward.judge import (
    EndpointJudge,
    Judge,
    WithJudges,
    check_endpoint,
    check_templates,
)
from tailrace.reward.judge_memory import check_folder
from tailrace.reward.judge_settings import EndpointJudgeSettings
from tailrace.types import Prompt


def check_judges(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Check the judges of a config, and ask those behind endpoints about an empty completion.

    Args:
        prompts: the first of the run.

    Raises:
        ConfigError: a judge cannot be reached, or cannot score these data.
    """
    reward = config.reward
    assert config.data
    sources = [each.name for each in sources_of(config.data) if isinstance(each, MixedSettings)]
    alone = not reward.calls_functions and not reward.code
    check_sources("judge", reward.judges, sources, complete=alone)
    for judge in reward.judges:
        scored = [prompt for prompt in prompts if judge.applies_to(prompt.source)]
        check_templates([judge], [prompt.row for prompt in scored])
        if isinstance(judge, EndpointJudgeSettings):
            for prompt in scored[:1]:
                _check_answer(judge, reward.timeout_s, prompt)
            continue
        check_folder(judge)
        if config.host.kind != "local":
            problem, remedy = "it runs on the controller's host only", 'serve it, and write "endpoint"'
            raise ConfigError("reward.judges.kind", judge.kind, problem, remedy)
        check_device("reward.judges.device", judge.device)


def _check_answer(judge: EndpointJudgeSettings, timeout_s: float, prompt: Prompt) -> None:
    call = Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source)
    if warning := clock.run(check_endpoint(judge, timeout_s, call), virtual=False):
        print(f"tailrace: warning: {warning}", file=sys.stderr)


@asynccontextmanager
async def open_judges(
    reward: RewardSettings, models: Sequence[Judge], text_of: Callable[[Sequence[int]], str]
) -> AsyncIterator[Callable[[Rewards], Rewards]]:
    """Connect to the judges behind endpoints.

    Args:
        models: the judges that are worker processes.
        text_of: turns token ids into text.

    Yields:
        What adds the scores of all judges to rewards.
    """
    async with AsyncExitStack() as stack:
        judges: list[Judge] = [*models]
        for each in reward.judges:
            if isinstance(each, EndpointJudgeSettings):
                judges.append(judge := EndpointJudge(each, reward.timeout_s))
                stack.push_async_callback(judge.close)
        drops = reward.on_timeout == "drop"
        yield lambda others: WithJudges(others, judges, text_of, drop_timeouts=drops) if judges else others
