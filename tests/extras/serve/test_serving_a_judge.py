"""The served engine as a judge."""

import asyncio

import pytest
from serve_cases import MODEL_NAME, generated

from helpers.tiny_models import LETTERS
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.kinds import Verdict
from tailrace.errors import ConfigError
from tailrace.extras.judges.endpoint import EndpointJudge, check_endpoint
from tailrace.extras.judges.settings import EndpointJudgeSettings

CALL = Call("", "ABC", [], "stop", {"answer": "DE"})


def settings(url: str, model: str = MODEL_NAME) -> EndpointJudgeSettings:
    return EndpointJudgeSettings(
        kind="endpoint",
        url=f"{url}/v1",
        model=model,
        template="{completion}{answer}",
        pattern="(.)",
        values={letter: 1.0 for letter in LETTERS},
        parameters={"temperature": 0.0, "max_tokens": 6},
    )


def test_a_served_engine_judges(url: str, native: NativeEngine) -> None:
    async def main() -> list[Verdict]:
        judge = EndpointJudge(settings(url), 60.0)
        try:
            return await asyncio.gather(*(judge.judge(CALL) for _ in range(3)))
        finally:
            await judge.close()

    (greedy,) = generated(native, [[LETTERS.index(letter) for letter in "ABCDE"]], 6, greedy=True)
    answer = "".join(LETTERS[id] for id in greedy.ids)
    assert asyncio.run(main()) == [Verdict(1.0, answer)] * 3


def test_a_model_that_is_not_served_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="'other': the endpoint has no such model; choose from tiny"):
        asyncio.run(check_endpoint(settings(url, "other"), 60.0, CALL))
