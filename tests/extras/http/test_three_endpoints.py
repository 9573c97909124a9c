"""Schedules on an engine of which only PipelineRL's three routes are open: our server, the others shut."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from helpers.served import TOKEN, served_here
from helpers.small_run import EXAMPLES
from tailrace.config import load_config
from tailrace.drivers.assembly.running import train
from tailrace.errors import ConfigError
from tailrace.extras.http import pipelinerl
from tailrace.extras.http.engine import TOKEN_VARIABLE
from tailrace.extras.http.pipelinerl import CHAT, CONNECT, UPDATE
from tailrace.extras.serve import app
from tailrace.record.figures import steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.summary import RunSummary

OVERRIDES = {
    "run.rounds": "8",
    "run.group_size": "8",
    "run.checkpoint_every": "0",
    "run.eval_every": "0",
    "trainer.learning_rate": "1e-3",
}
SCHEDULES = {
    "serial": {"groups_per_round": 4, "groups_per_step": 2},
    "rolloutpipe": {"groups_per_round": 4, "groups_per_step": 2},
    "april": {"groups_per_round": 4, "groups_launched": 8},
    "pipelinerl": {"groups_per_step": 4, "in_flight_per_engine": 12, "ring_groups": 8},
    "tailbatch": {"groups_per_round": 4},
    "tailrace": {"groups_per_step": 4, "groups_in_flight": 8, "staleness": 2},
}


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    whole, routes = app.make_app, (CHAT, CONNECT, UPDATE)

    def shut(*arguments: Any) -> ASGIApp:
        answer = whole(*arguments)

        async def only(scope: Scope, receive: Receive, send: Send) -> None:
            is_open = scope["type"] != "http" or scope["path"] in routes
            await (answer if is_open else Response(status_code=404))(scope, receive, send)

        return only

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "make_app", shut)
        with served_here(EXAMPLES / "quickstart" / "model", "--dtype", "float32") as url:
            yield url


@pytest.mark.parametrize("name", ["pipelinerl", *(slow(name) for name in SCHEDULES if name != "pipelinerl")])
def test_a_schedule_learns_and_loses_nothing_over_three_routes(
    name: str, url: str, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    text, folder = config_path.read_text(), config_path.parent / "out"
    begin, end = text.index("[schedule]"), text.index("[model]")
    schedule = "".join(f"{key} = {value}\n" for key, value in SCHEDULES[name].items())
    text = text[:begin] + f'[schedule]\nname = "{name}"\n{schedule}\n' + text[end:]
    joined = f'[engine]\nkind = "pipelinerl"\nurls = ["{url}"]\n'
    text = text.replace("[engine]\n", joined) + '\n[weights]\ntransport = "process_group"\n'
    config_path.write_text(text)
    train(load_config(config_path, OVERRIDES), folder)
    steps = steps_of(read_rows(folder / "metrics.jsonl"))
    assert steps[-1]["reward"] > 2 * steps[0]["reward"], "more digits, which is what is rewarded"
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=RunSummary)
    tokens = summary.tokens
    assert tokens.generated == tokens.trained + tokens.parked + sum(tokens.wasted.values())
    assert summary.failures == {}
    # The engine computes with the weights that were published: its log-probs are the trainer's.
    exact = [row["engine_mismatch_kl"] for row in steps if "engine_mismatch_kl" in row]
    assert exact and max(map(abs, exact)) < 1e-5


@pytest.mark.slow
def test_two_such_engines_are_ranks_of_one_group(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    groups, call = list[Mapping[str, Any]](), pipelinerl.call

    async def noted(*arguments: Any, **named: Any) -> Any:
        if CONNECT in arguments:
            groups.append(named["body"])
        return await call(*arguments, **named)

    monkeypatch.setattr(pipelinerl, "call", noted)
    model, folder = EXAMPLES / "quickstart" / "model", config_path.parent / "out"
    with served_here(model, "--dtype", "float32") as one, served_here(model, "--dtype", "float32") as two:
        engine = {"engine.kind": "pipelinerl", "engine.urls": f'["{one}", "{two}"]'}
        weights = {"weights.transport": "process_group"}
        train(load_config(config_path, OVERRIDES | {"run.rounds": "3"} | engine | weights), folder)
    shared = [group for group in groups if group["world_size"] == 3]
    assert sorted(group["rank_offset"] for group in shared) == [1, 2], "made once"
    assert len({group["master_port"] for group in shared}) == 1
    steps = steps_of(read_rows(folder / "metrics.jsonl"))
    exact = [row["engine_mismatch_kl"] for row in steps if "engine_mismatch_kl" in row]
    assert len(exact) > 1 and max(map(abs, exact)) < 1e-5


def test_weights_by_files_are_refused_before_the_start(config_path: Path) -> None:
    changes = {"engine.kind": "pipelinerl", "engine.urls": '["http://127.0.0.1:1"]'}
    with pytest.raises(ConfigError, match=r"weights.transport.*takes weights over a process group"):
        train(load_config(config_path, changes), config_path.parent / "out")


def test_such_an_engine_is_joined_and_not_started(config_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.urls = None: it is missing"):
        load_config(config_path, {"engine.kind": "pipelinerl"})
