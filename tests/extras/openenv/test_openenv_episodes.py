"""Episodes and runs of an environment of OpenEnv, whose server is a process of its own."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tailrace
from helpers.chatty_model import END, chatty_tokenizer, save_chatty_model
from tailrace.contracts.environments import Environment, Outcome
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import text_of
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.environments.history import Chat, RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.errors import ConfigError, EnvironmentFailed
from tailrace.extras.openenv.environment import action_of
from tailrace.extras.openenv.settings import OpenEnvSettings
from tailrace.rollout.episode import Episode
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = pytest.mark.environments

TOKENIZER = chatty_tokenizer()
ENCODER = RequestEncoder(RowsSettings(path=Path("unused.jsonl")), TOKENIZER, 512)


class Script:
    """An engine whose turns are known. It hangs before the turn `hang_at`, once."""

    def __init__(self, *turns: str, hang_at: int | None = None) -> None:
        self.turns, self.hang_at, self.hangs = turns, hang_at, asyncio.Event()

    async def serve(self, sample: Sample) -> None:
        number = sum(1 for turn in sample.turns if turn.num_tokens)
        if number == self.hang_at:
            self.hang_at = None
            self.hangs.set()
            await asyncio.Event().wait()
        ids = TOKENIZER.encode(self.turns[number] + END, add_special_tokens=False)
        sample.extend(ids, [-0.5] * len(ids), version=number)
        sample.finish_reason = "stop"


def new_sample(index: int = 3, **row: object) -> Sample:
    start = ENCODER.start()
    prompt = Prompt(index, start, "Guess.", {"prompt": "Guess.", **row}, index, given="Guess.")
    return Sample(SampleId(index, 0, 0), Group(prompt, 1, []))


def episode(sample: Sample, script: Script) -> Episode:
    return Episode(
        sample,
        script.serve,
        Chat(TOKENIZER, "openenv", {}, "user").observe,
        text_of(TOKENIZER),
        sampling=SamplingSettings(),
        max_context_tokens=512,
        parking_timeout_s=0.0,
    )


def play(url: str, sample: Sample, *turns: str, **settings: Any) -> Outcome:
    async def played(environment: Environment) -> Outcome:
        return await environment.run(sample.prompt, episode(sample, Script(*turns)))

    return with_environment(url, played, **settings)


def with_environment(url: str, use: Callable[[Environment], Any], **settings: Any) -> Any:
    section = OpenEnvSettings.model_validate({"kind": "openenv", "url": url, **settings})

    async def main() -> Any:
        async with environment_kind(section).open(section, TOKENIZER, ENCODER) as environment:
            assert environment is not None
            return await use(environment)

    return asyncio.run(main())


def said(sample: Sample) -> list[str]:
    """What stands before each turn of the policy."""
    return [TOKENIZER.decode(turn.observation_ids) for turn in sample.turns if turn.observation_ids]


@pytest.fixture
def url(serve: Callable[[int], str]) -> str:
    return serve(8)


def test_turns_are_actions_and_the_rewards_of_the_steps_are_summed(url: str) -> None:
    sample = new_sample(letter="c")
    outcome = play(url, sample, "a", "c", reset={"letter": "letter"}, observation="text")
    assert outcome == Outcome(0.75, {"turns": 2, "malformed": 0})
    opening, answer = said(sample)
    assert "Guess.\n\nIt is one of abcd." in opening and "later" in answer


def test_a_whole_observation_is_json_and_the_last_reward_may_count(url: str) -> None:
    sample = new_sample(letter="c")
    outcome = play(url, sample, "a", "d", "c", reset={"letter": "letter"}, reward="last")
    assert outcome.reward == 1.0
    assert '"text": "earlier", "asked": 2}' in said(sample)[2]


def test_a_seed_of_the_row_makes_one_task_of_a_group(url: str) -> None:
    def rewards(index: int) -> list[float | None]:
        return [play(url, new_sample(index), letter, max_turns=1).reward for letter in "abcd"]

    found = [rewards(index) for index in (3, 3, 5)]
    assert all(sorted(map(float, each)) == [-0.25, -0.25, -0.25, 1.0] for each in found)  # type: ignore[arg-type]
    assert found[0] == found[1] != found[2]


def test_an_action_that_does_not_fit_is_answered_and_the_episode_goes_on(url: str) -> None:
    sample = new_sample(letter="c")
    outcome = play(url, sample, '{"letter": 5}', "c", reset={"letter": "letter"})
    assert outcome == Outcome(1.0, {"turns": 2, "malformed": 1})
    assert "error: the action does not fit its schema" in said(sample)[1]


def test_an_episode_ends_after_its_turns(url: str) -> None:
    outcome = play(url, new_sample(letter="c"), "a", "b", "c", reset={"letter": "letter"}, max_turns=2)
    assert outcome == Outcome(-0.5, {"turns": 2, "malformed": 0})


def test_an_interrupted_episode_repeats_its_actions_in_a_new_session(url: str) -> None:
    sample, script = new_sample(letter="c"), Script("a", "b", "c", hang_at=2)

    async def played(environment: Environment) -> Outcome:
        first = asyncio.ensure_future(environment.run(sample.prompt, episode(sample, script)))
        await script.hangs.wait()
        first.cancel()
        await asyncio.wait([first])
        return await environment.run(sample.prompt, episode(sample, script))

    outcome = with_environment(url, played, reset={"letter": "letter"})
    assert outcome == Outcome(0.5, {"turns": 3, "malformed": 0})
    assert '"asked": 2' in said(sample)[2]


def test_sessions_wait_for_each_other_and_a_server_without_room_is_named(serve: Callable[[int], str]) -> None:
    async def played(environment: Environment) -> list[Any]:
        samples = [new_sample(letter="c") for _ in range(6)]
        runs = [environment.run(each.prompt, episode(each, Script("a", "c"))) for each in samples]
        return await asyncio.gather(*runs, return_exceptions=True)

    one, given = serve(1), {"letter": "letter"}
    outcomes = with_environment(one, played, reset=given, max_sessions=1)
    assert [each.reward for each in outcomes] == [0.75] * 6
    outcomes = with_environment(one, played, reset=given, max_sessions=6)
    refused = [str(each) for each in outcomes if isinstance(each, EnvironmentFailed)]
    assert refused and all("CAPACITY_REACHED" in each for each in refused)


@pytest.mark.parametrize(
    ("turns", "settings", "reason", "told"),
    [
        (["!"], {}, "server", "the board fell over"),
        (
            ["a"],
            {"observation": "board"},
            "observation",
            "it has no field 'board', it has metadata, text, asked",
        ),
        (["a"], {"reset": {"letter": "word"}}, "reset", "the row has no column 'word'"),
    ],
)
def test_an_environment_that_fails_says_why(
    url: str, turns: Sequence[str], settings: dict[str, Any], reason: str, told: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=told) as failed:
        play(url, new_sample(), *turns, **settings)
    assert failed.value.reason == reason


def test_a_server_that_does_not_answer_is_refused_before_the_start() -> None:
    section = OpenEnvSettings(kind="openenv", url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no server of OpenEnv answers GET http://127\.0\.0\.1:9/schema"):
        environment_kind(section).check(section)


GUESS = {"properties": {"letter": {"type": "string"}, "metadata": {}}, "required": ["letter"]}
NUMBER = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
MOVE = {"properties": {"x": {}, "y": {}}, "required": ["x", "y"]}


@pytest.mark.parametrize(
    ("text", "schema", "action"),
    [
        ("a", GUESS, {"letter": "a"}),
        ("12", GUESS, {"letter": "12"}),
        ("<think>\nb?\n</think>\n a", GUESS, {"letter": "a"}),
        ('```json\n{"letter": "b"}\n```', GUESS, {"letter": "b"}),
        ("12", NUMBER, {"n": 12}),
        ("twelve", NUMBER, {"n": "twelve"}),
        ('{"x": 1, "y": 2}', MOVE, {"x": 1, "y": 2}),
    ],
)
def test_a_turn_is_an_action(text: str, schema: dict[str, Any], action: dict[str, Any]) -> None:
    assert action_of(text, schema) == action


@pytest.mark.parametrize("text", ["", "1", '{"x": 1}', "[" * 10_000])
def test_a_turn_without_the_fields_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="an action is a JSON object with x, y"):
        action_of(text, MOVE)


CONFIG = """
[run]
rounds = 2
group_size = 2

[schedule]
name = "april"
groups_per_round = 3
groups_launched = 5

[model]
path = "{model}"

[data]
kind = "rows"
path = "rows.jsonl"

[environment]
kind = "openenv"
url = "{url}"
observation = "text"
max_turns = 2

[sampling]
max_completion_tokens = 32

[engine]
dtype = "float32"
max_num_seqs = 8

[trainer]
dtype = "float32"
"""


def test_a_run_trains_on_an_environment_and_parked_episodes_go_on(url: str, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"Guess the letter {n}."}) + "\n" for n in range(32))
    (tmp_path / "rows.jsonl").write_text(rows)
    save_chatty_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG.format(model=tmp_path / "model", url=url))
    folder = tmp_path / "run"
    summary = tailrace.train(tailrace.load_config(tmp_path / "run.toml"), folder)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "loss" in row]
    assert summary.steps == len(steps) == 2
    for row in steps:
        assert row["engine_mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
        assert 1.0 <= row["rewards/environment/turns"] <= 2.0
        assert -0.5 <= row["reward"] <= 1.0
