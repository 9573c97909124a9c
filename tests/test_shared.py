"""What leaves the machine is chosen: a text of the config is shared only if its field says so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from tailrace.cli import main
from tailrace.config import RunConfig, load_config
from tailrace.kinds import import_all, sections_in
from tailrace.settings import SHARED, Settings, marks_of

PRIVATE = """
contracts.reward reference_column
controller.base replay
drivers.data.settings system_prompt template answer prompt_column tools_column eval_path prompt_template
drivers.engine.settings urls python args env
drivers.environments.settings functions environment arguments
drivers.reward.settings system rows arguments column
drivers.weights.settings folder host
drivers.workers.base listen
extras.agents.settings function command
extras.cluster.settings address engine trainer reward reference
extras.http.settings urls url model api_key_env
extras.judges.settings pattern field values url model template api_key_env cache_folder labels
extras.openenv.settings url reset observation
extras.tinker.settings urls
extras.verifiers.taskset args verifiers agent
record.base sinks trackers project
rollout.placement profile
sim.settings path
config schedules response_column schedule
"""
"""Fields with texts or tables that stay on the machine, by module. A field is here, or it is `Shared`."""


def fields(section: type[Settings] = RunConfig) -> Iterator[tuple[tuple[str, str], FieldInfo]]:
    """Each field of the sections that a config may have, with the module and the name of its definition."""
    for name, field in section.model_fields.items():
        inner = sections_in(field)
        owner = next(each for each in section.__mro__ if name in each.__annotations__)
        yield (owner.__module__.removeprefix("tailrace."), name), field
        for each in inner:
            yield from fields(each)


def holds_text(annotation: Any) -> bool:
    """Whether a value may have a text or a table that is no section and no literal."""
    parts = () if get_origin(annotation) is Literal else get_args(annotation)
    return (
        annotation in (str, Path, Any, dict) or get_origin(annotation) is dict or any(map(holds_text, parts))
    )


def test_each_field_with_texts_says_whether_they_leave_the_machine() -> None:
    import_all()
    private = {(row.split()[0], name) for row in PRIVATE.strip().splitlines() for name in row.split()[1:]}
    found = {key: SHARED in marks_of(field) for key, field in fields() if holds_text(field.annotation)}
    assert {key for key, is_shared in found.items() if is_shared == (key in private)} == set()
    assert private - found.keys() == set() and len(found) > 70


SECRET = """
run = { rounds = 2, group_size = 4 }
schedule = { name = "serial", groups_per_round = 4, groups_per_step = 4 }
schedules."secret.py:s" = { window = 3 }
model.path = "secret/base"
engine = { kind = "vllm", env = { TOKEN = "secret" }, args = ["--api-key", "secret"] }
weights = { transport = "filesystem", folder = "secret" }
[data]
kind = "rows"
path = "secret/rows.jsonl"
system_prompt = "secret"
chat_template_kwargs = { enable_thinking = false, persona = "secret" }
[reward]
function = "secret.py:digits"
judges = [{ kind = "endpoint", url = "http://secret/v1?key=1", model = "secret", template = "secret" }]
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A config with a secret in texts of each sort."""
    (tmp_path / "secret" / "base").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(SECRET)
    parameters = "groups_per_round, groups_per_step, window, mode, order, admission"
    (tmp_path / "secret.py").write_text(f"async def s(run, *, {parameters}):\n    await run.start()\n")
    return tmp_path / "run.toml"


def test_numbers_literals_and_names_are_shared_and_no_path(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(secret.parent)
    shared = load_config(secret).shared()
    assert "secret" not in json.dumps(shared) and str(secret.parent) not in json.dumps(shared)
    assert shared["schedule"] == {"name": "serial", "groups_per_round": 4, "groups_per_step": 4}
    assert (shared["model"], shared["data"]["path"]) == ({"path": "base"}, "rows.jsonl")
    assert shared["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (shared["trainer"]["learning_rate"], shared["engine"]["dtype"]) == (1e-6, "float32")
    assert shared["reward"]["judges"][0]["parameters"] == {"temperature": 0.0, "max_tokens": 512}
    own = {"schedule.name": "secret.py:s", "schedule.mode": "secret", "schedule.order": "launched"}
    shared = load_config(
        secret, {**own, "schedule.admission": '{ kind = "at_most", to = "secret" }'}
    ).shared()
    counts = {"groups_per_round": 4, "groups_per_step": 4, "window": 3}
    assert shared["schedule"] == {**counts, "order": "launched", "admission": {"kind": "at_most"}}


def test_a_tracker_gets_what_is_shared(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no tracker: pip install 'tailrace[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--output-dir", str(secret.parent / "out"), "--record.trackers", '["wandb"]']
    assert main(["simulate", str(secret), *words]) == 0
    (stored,) = (secret.parent / "out").rglob("run-*.wandb")
    assert b"groups_per_step" in stored.read_bytes() and b"secret" not in stored.read_bytes()
