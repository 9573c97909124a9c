"""Judges behind endpoints that fail, refuse, hang and speak unclearly."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from judge_cases import SILENCE, Endpoint, serving

from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.kinds import Verdict
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges import endpoint as judge
from tailrace.extras.judges.endpoint import AnswerCache, EndpointJudge, check_endpoint, score_reader
from tailrace.extras.judges.settings import EndpointJudgeSettings


def settings(url: str = "http://127.0.0.1:1/v1", **changes: object) -> EndpointJudgeSettings:
    given = {"kind": "endpoint", "url": url, "model": "m", "template": "{completion}"}
    return EndpointJudgeSettings.model_validate(given | changes)


def said(word: str) -> Call:
    return Call("", word, [], "stop", {})


Use = Callable[[EndpointJudge, Endpoint], Awaitable[Any]]


def judged(use: Use, *answers: str | int, timeout_s: float = 30.0, **changes: object) -> Any:
    """Use a judge whose endpoint gives these answers."""

    async def main() -> Any:
        async with serving(*answers) as endpoint:
            judge = EndpointJudge(settings(endpoint.url, **changes), timeout_s)
            try:
                return await use(judge, endpoint)
            finally:
                await judge.close()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.001)


async def ask_once(judge: EndpointJudge, endpoint: Endpoint) -> tuple[Verdict, int]:
    return await judge.judge(said("x")), len(endpoint.bodies)


THREE = (
    *("Score: 3", "Score: 3/10", "**3** / 10", "I give it 3 out of 10.", "3 of 10", "3/10.0"),
    *("3 (out of 10)", "3 points out of 10"),
    *("3 (on a scale of 0 to 10)", "3 (0-10)", "3 (scale: 0 - 10)", "3 (max 10)", "On a scale of 10: 3"),
    *("3 out of a possible 10", "3 out of the 10", "3 of a total of 10", "3 on a 10-point scale"),
    *("3 (max. 10)", "\\boxed{3}/10", "3\n/10", "3 out of\n10", "3 [0, 10]", "3 (0..10)", "3 (0\u201410)"),
    *("3 of them right: 3", "**3**/**10**", "Of 10 points: 3", "1" * 30_000 + ", so 3"),
)
NO_SCORE = (
    *("3/5", "10%", "between 6 and 10", "-1", "1 to 10", "/10", "?/10", "N/A out of 10", "score: -/10"),
    *("three out of 10", "**Score:** three/10", "Score: zero out of 10", "4-5/10", "One of 10 is right."),
)


@pytest.mark.parametrize(
    ("changes", "answer", "score"),
    [
        ({}, "First 0.1, in the end 0.7.", 0.7),
        ({}, "no number", None),
        ({}, "7", None),
        ({"scale": (1, 5)}, "Score: 4", 0.75),
        ({"scale": (10, 0)}, "Errors: 10", 0.0),
        ({"pattern": r"(?i)verdict: (\w+)", "values": {"Yes": 1, "no": 0}}, "Verdict: yes", 1.0),
        ({"pattern": r"(?i)verdict: (\w+)", "values": {"Yes": 1, "no": 0}}, "Verdict: maybe", None),
        ({"field": "score"}, 'So: ```{"why": "{", "score": 1}```', 1.0),
        ({"field": "score"}, '{"score": "0.5"} and {"other": 3}', 0.5),
        ({"field": "score"}, '{"score": NaN}', None),
        ({"field": "score"}, "{score: 1}", None),
        ({"field": "ok"}, '{"ok": true}', 1.0),
        ({"field": "ok"}, '{"ok": "1/10"}', None),
        *(({"scale": (0, 10)}, answer, 0.3) for answer in THREE),
        *(({"scale": (0, 10)}, answer, None) for answer in NO_SCORE),
        *(({}, answer, 0.0) for answer in ("0/1", "0 out of 1", "**Score:** 0/1")),
        *(({}, answer, None) for answer in ("1/10", "1%", "1 out of 5")),
        ({"scale": (0, 100)}, "30%", 0.3),
        ({"scale": (10, 1)}, "7/10", 1 / 3),
    ],
)
def test_the_score_is_read_from_the_answer(
    changes: dict[str, object], answer: str, score: float | None
) -> None:
    assert score_reader(settings(**changes))(answer) == score


def test_the_question_is_sent_as_the_settings_say() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> Any:
        await judge.judge(said("2"))
        return endpoint.bodies

    changes: dict[str, object] = {"system": "Be fair.", "parameters": {"max_completion_tokens": 9}}
    (body,) = judged(use, "1", template="Is {completion} right?", **changes)
    messages = [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "Is 2 right?"},
    ]
    assert body == {"model": "m", "messages": messages, "max_completion_tokens": 9}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_of_the_endpoint_is_retried_and_is_no_score(status: int) -> None:
    verdict, num_asked = judged(ask_once, status, status, "0.5")
    assert (verdict, num_asked) == (Verdict(0.5, "0.5"), 3)


def test_an_endpoint_that_stays_down_fails_the_sample() -> None:
    with pytest.raises(RewardFailed, match="judge unavailable: HTTP 503"):
        judged(ask_once, 503, retry_timeout_s=0.05)


async def test_a_connection_that_fails_is_retried_until_the_server_is_there() -> None:
    async with serving("1") as endpoint:
        url = endpoint.url
    port = int(url.split(":")[2].partition("/")[0])
    judge = EndpointJudge(settings(url), 30.0)
    asking = asyncio.create_task(judge.judge(said("x")))
    await asyncio.sleep(0.05)
    assert not asking.done()
    async with await asyncio.start_server(Endpoint(["1"]).serve, "127.0.0.1", port):
        verdict = await asking
    await judge.close()
    assert verdict == Verdict(1.0, "1")


def test_a_refused_question_is_not_retried_and_the_key_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "key-123")
    with pytest.raises(RewardFailed) as failed:
        judged(ask_once, 400, api_key_env="JUDGE_KEY")
    assert str(failed.value) == 'judge refused: HTTP 400: {"error": "400 for ***"}'


def test_a_redirection_is_no_answer() -> None:
    with pytest.raises(RewardFailed, match="judge refused: HTTP 307"):
        judged(ask_once, 307)


def test_an_address_without_a_number_as_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="'http://host:x/v1': this is no address"):
        EndpointJudge(settings("http://host:x/v1"), 1.0)


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> str:
        await judge.judge(said("x"))
        return endpoint.headers[0]

    monkeypatch.setenv("JUDGE_KEY", "key-123\n")
    head = judged(use, "1", api_key_env="JUDGE_KEY")
    assert "authorization: bearer key-123\r\n" in head.lower()


def test_a_key_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="'JUDGE_KEY': this environment variable is not set"):
        EndpointJudge(settings(api_key_env="JUDGE_KEY"), 1.0)


def test_an_unreadable_answer_is_asked_for_again_at_a_higher_temperature() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> Any:
        verdict = await judge.judge(said("x"))
        return verdict.score, [body["temperature"] for body in endpoint.bodies]

    assert judged(use, "well", "hm", "1") == (1.0, [0.0, 1.0, 1.0])


def test_answers_that_cannot_be_read_fail_the_sample() -> None:
    with pytest.raises(RewardFailed, match="judge unreadable: no score in 2 answers: 'well'"):
        judged(ask_once, "well", asks=2)


def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        judged(ask_once, SILENCE, timeout_s=0.2)


def test_a_slow_answer_delays_no_other() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> list[bool]:
        slow = asyncio.create_task(judge.judge(said("slow")))
        await endpoint.is_silent.wait()
        await asyncio.gather(*(judge.judge(said(str(number))) for number in range(4)))
        return [slow.done(), slow.cancel()]

    assert judged(use, SILENCE, "1") == [False, True]


def test_requests_at_a_time_are_bounded() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> int:
        await asyncio.gather(*(judge.judge(said(str(number))) for number in range(12)))
        return endpoint.most_open

    assert judged(use, "1", concurrency=3) == 3


def test_equal_questions_are_asked_once() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> Any:
        first = asyncio.create_task(judge.judge(said("x")))
        second = asyncio.create_task(judge.judge(said("x")))
        await asyncio.sleep(0)
        first.cancel()
        verdicts = [await second, await judge.judge(said("x"))]
        return verdicts, len(endpoint.bodies), first.cancelled()

    assert judged(use, "0.5", "0.6") == ([Verdict(0.5, "0.5")] * 2, 1, True)


def test_a_failure_is_not_kept() -> None:
    async def use(judge: EndpointJudge, endpoint: Endpoint) -> Verdict:
        with pytest.raises(RewardFailed):
            await judge.judge(said("x"))
        return await judge.judge(said("x"))

    assert judged(use, "well", "1", asks=1) == Verdict(1.0, "1")


def test_the_cache_in_memory_is_bounded_and_the_one_in_a_folder_is_not(tmp_path: Path) -> None:
    cache = AnswerCache(2, tmp_path / "answers")
    for word in ("a", "b", "a", "c"):
        cache.put(cache.key("url", word), word)
    assert [*cache._answers.values()] == ["a", "c"]
    later = AnswerCache(0, tmp_path / "answers")
    assert [later.get(later.key("url", word)) for word in ("a", "b", "c", "d")] == ["a", "b", "c", None]
    assert not later._answers


async def test_a_later_run_takes_answers_from_the_folder(tmp_path: Path) -> None:
    changes: dict[str, object] = {"cache_folder": tmp_path, "url": "http://127.0.0.1:1/v1"}

    async def main(judge: EndpointJudge) -> Verdict:
        cache = AnswerCache(1, tmp_path)
        question = [{"role": "user", "content": "x"}]
        cache.put(cache.key("http://127.0.0.1:1/v1", "m", question, judge.settings.parameters), "0.5")
        try:
            return await judge.judge(said("x"))
        finally:
            await judge.close()

    assert await main(EndpointJudge(settings(**changes), 1.0)) == Verdict(0.5, "0.5")


def checked(*answers: str | int, models: list[str] | None = None, timeout_s: float = 30.0) -> str | None:
    async def main() -> str | None:
        async with serving(*answers, models=models) as endpoint:
            return await check_endpoint(settings(endpoint.url), timeout_s, said(""))

    return asyncio.run(main())


def test_a_sound_endpoint_passes_the_check() -> None:
    assert checked("1") is None
    assert checked("1", models=["m"]) is None
    assert checked("1", models=["*"]) is None


def test_an_unreadable_first_answer_is_a_warning() -> None:
    assert checked("well") == "the judge judge: no score in 3 answers: 'well'"


def test_an_unreachable_judge_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(check_endpoint(settings("http://127.0.0.1:1/v1"), 5.0, said("")))
    assert str(refused.value) == (
        "reward.judges.url = 'http://127.0.0.1:1/v1': the judge cannot be reached "
        "(ConnectError: All connection attempts failed); start its server, or correct the address"
    )


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        checked("1", models=["a", "b"])
    assert str(refused.value) == (
        "reward.judges.model = 'm': the endpoint has no such model; choose from a, b"
    )


def test_a_question_that_is_refused_and_a_slow_judge_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"it refuses the question .*HTTP 401.*check .*api_key_env"):
        checked(401)
    with pytest.raises(ConfigError, match=r"reward.timeout_s = 0.2: the judge judge did not answer in time"):
        checked(SILENCE, timeout_s=0.2)


def test_halves_of_surrogate_pairs_in_an_answer_are_replaced(tmp_path: Path) -> None:
    """The files of the cache and the ledger hold Unicode only."""
    verdict, _ = judged(ask_once, "\ud800 0.5", cache_folder=tmp_path)
    assert verdict == Verdict(0.5, "? 0.5")
