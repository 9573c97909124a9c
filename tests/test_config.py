"""The config: read, overridden, resolved; what cannot work is one message in the user's words."""

import json
import re
from inspect import signature
from pathlib import Path

import pytest

from tailrace.config import (
    LiveConfig,
    PolicyConfig,
    RunConfig,
    changed_keys,
    check_resumable,
    counterparts,
    load_config,
    may_change,
    sections_at,
    validated,
)
from tailrace.drivers.assembly.schedule import resolve
from tailrace.errors import ConfigError
from tailrace.kinds import import_all, sections_in
from tailrace.schedules import SCHEDULES
from tailrace.settings import Settings

BASE = """
[run]
rounds = 3
group_size = 4
[schedule]
name = "serial"
groups_per_round = 8
groups_per_step = 2
"""


def load(folder: Path, text: str = "", overrides: dict[str, str] | None = None) -> RunConfig:
    (folder / "config.toml").write_text(BASE + text)
    return load_config(folder / "config.toml", overrides)


def message(folder: Path, text: str, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides)
    return str(caught.value)


def test_a_config_is_read_and_every_default_written_out(tmp_path: Path) -> None:
    config = load(tmp_path, "[sim.engines]\ncount = 3\n")
    assert (config.run.rounds, config.run.group_size, config.sim.engines.count) == (3, 4, 3)
    (tmp_path / "again.toml").write_text(config.toml())
    assert load_config(tmp_path / "again.toml") == config


def test_what_keys_of_other_systems_are_here_exists() -> None:
    import_all()
    schedules = {name for schedule in SCHEDULES.values() for name in signature(schedule).parameters}
    for ours in (key for keys in counterparts() if ":" not in keys for key in keys.split(" and ")):
        *sections, name = ours.split(".")
        kinds = sections_at(sections)
        known = {key for kind in kinds for key in kind.model_fields} if kinds else schedules
        assert name in known, ours
    theirs = [name for names in counterparts().values() for name in names]
    assert len(theirs) == len(set(theirs))


def test_the_files_of_an_environment_are_relative_to_the_config(tmp_path: Path) -> None:
    config = load(tmp_path, "[environment]\nkind = 'tools'\nfunctions = ['a.py:f', 'm:g']\n")
    assert config.environment.functions == (f"{tmp_path}/a.py:f", "m:g")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("run.rounds", "true", "run.rounds = True: it is no whole number"),
        ("run.rounds", '"3"', "run.rounds = '3': it is no whole number"),
        ("trainer.learning_rate", '"1"', "trainer.learning_rate = '1': it is no number"),
        ("run.eval_temperature", "true", "run.eval_temperature = True: it is no number"),
        ("run.eval_greedy", "1", "run.eval_greedy = 1: it is neither true nor false"),
        ("run.eval_greedy", "yes", "run.eval_greedy = 'yes': it is neither true nor false"),
        ("run.rounds", "1" + "0" * 30, "an integer has at most 64 bits"),
        ("run.group_size", "1" + "0" * 18, "it must be at most 65536"),
        ("model.path", '"a\\u0000b"', "model.path = 'a\\x00b': a path has no NUL character"),
    ],
)
def test_a_value_is_not_turned_into_one_of_another_type(
    tmp_path: Path, key: str, text: str, said: str
) -> None:
    assert said in message(tmp_path, "", {key: text})
    section, _, name = key.partition(".")
    if section not in BASE:
        assert said in message(tmp_path, f"[{section}]\n{name} = {text if text != 'yes' else repr(text)}\n")


def test_a_boolean_may_be_written_as_python_writes_it(tmp_path: Path) -> None:
    assert load(tmp_path, overrides={"run.eval_greedy": str(False)}).run.eval_greedy is False


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_config(tmp_path / "config.toml").run.rounds == 3


def test_a_file_with_thousands_of_open_brackets_is_refused(tmp_path: Path) -> None:
    assert "this is not TOML" in message(tmp_path, "a = " + "[" * 5000 + "]" * 5000)
    assert "there is no such key" in message(tmp_path, "", {"run.a": "[" * 5000})


def test_all_that_is_wrong_comes_in_one_message(tmp_path: Path) -> None:
    lines = message(tmp_path, "[sim.engines]\ncuont = 3\nslots = 0\n").splitlines()
    assert [line.partition(" = ")[0] for line in lines] == ["sim.engines.slots", "sim.engines.cuont"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[run]\nrounds = 1\ngroup_size = 1\n", "schedule = None: it is missing; set it"),
        ("[schedule]\nname = 'serial'\n", "run = None: it is missing; set it"),
        ("run = 3\n[schedule]\n", "run = 3: it is no section"),
        ("model = 3\n[run]\nrounds = 1\ngroup_size = 1\n[schedule]\n", "model = 3: it is no section"),
        ("[run\n", "this is not TOML"),
    ],
)
def test_sections_that_are_missing_or_no_sections(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "config.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file; name a TOML file"):
        load_config(tmp_path / "nowhere.toml")


def test_a_preset_is_resolved_and_what_the_section_says_wins(tmp_path: Path) -> None:
    config = load(tmp_path, "[algorithm]\nname = 'dapo'\nclip_high = 0.3\n")
    assert (config.algorithm.clip_high, config.algorithm.filter) == (0.3, "zero_variance")
    (tmp_path / "again.toml").write_text(config.toml())
    assert load_config(tmp_path / "again.toml") == config


def test_overrides_win_and_are_toml_values_or_else_strings(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        overrides={
            "run.seed": "7",
            "schedule.name": "rolloutpipe",
            "schedule.admission.kind": '"frontier"',
            "schedule.admission.groups": "2",
            "trainer.betas": "[0.8, 0.9]",
        },
    )
    assert config.run.seed == 7
    assert config.schedule["name"] == "rolloutpipe"
    assert config.schedule["admission"] == {"kind": "frontier", "groups": 2}
    assert config.trainer.betas == (0.8, 0.9)


ROLLOUTPIPE = """
run = { rounds = 2, group_size = 4 }
schedule = { name = "rolloutpipe", groups_per_round = 8, groups_per_step = 4, max_tokens_per_batch = 512 }
"""


@pytest.mark.parametrize(
    ("overrides", "schedule", "said"),
    [
        (
            {"schedule.name": "tailrace"},
            {"groups_per_step": 4, "groups_in_flight": 8, "staleness": 1},
            "without groups_per_round = 8, max_tokens_per_batch = 512, and with groups_in_flight = 8, "
            "staleness = 1; run.rounds stays 2",
        ),
        (
            {"schedule": {"name": "tailrace", "staleness": 2, "kv": "recompute"}, "run": {"rounds": 3}},
            {"groups_per_step": 4, "groups_in_flight": 12, "staleness": 2, "kv": "recompute"},
            "with groups_in_flight = 12; run.rounds stays 3",
        ),
        ({"schedule.name": "rolloutpipe_eager"}, {"groups_per_round": 8, "max_tokens_per_batch": 512}, ""),
        ({"schedule.name": "rolloutpipe", "schedule.groups_per_step": "2"}, {"groups_per_step": 2}, ""),
    ],
)
def test_another_schedule_translates_the_keys_of_the_file_and_keeps_those_given_with_it(
    tmp_path: Path,
    overrides: dict[str, object],
    schedule: dict[str, object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(ROLLOUTPIPE)
    found = load_config(path, overrides).schedule
    assert {key: found.get(key) for key in schedule} == schedule
    assert ("groups_per_round" in found) == (found["name"] != "tailrace")
    assert capsys.readouterr().err.strip().endswith(said)


@pytest.mark.parametrize(
    ("section", "given", "problem"),
    [
        ("", {"schedule.groups_per_round": "8"}, "schedule.groups_per_round = 8: the schedule has no such"),
        ("groups_per_rond = 8", {}, "groups_per_rond = 8: neither serial nor tailrace has such a parameter"),
        ("", {"schedule.staleness": "many"}, "schedule.staleness = 'many': "),
    ],
)
def test_a_key_that_the_other_schedule_lacks_is_refused_if_it_was_given_for_it(
    tmp_path: Path, section: str, given: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        resolve(load(tmp_path, section, {"schedule.name": "tailrace", **given}))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("record.trackers", "wandb", ("wandb",)),
        ("record.trackers", "wandb, trackio", ("wandb", "trackio")),
        ("record.trackers", '["wandb"]', ("wandb",)),
        ("trainer.lora.target_modules", "q_proj,v_proj", ("q_proj", "v_proj")),
        ("trainer.lora.target_modules", "all-linear", "all-linear"),
        ("trainer.betas", "0.9,0.95", (0.9, 0.95)),
        ("host.join", "trainer,engine", ("trainer", "engine")),
    ],
)
def test_a_list_is_written_with_commas_on_the_command_line(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    more = {"host.listen": "10.0.0.7:7777"} if key.startswith("host") else {}
    found: object = load(tmp_path, "[trainer.lora]\nrank = 2\n", {key: text, **more})
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_list_of_a_kind_that_only_the_command_line_names(tmp_path: Path) -> None:
    found = load(tmp_path, "", {"engine.kind": "vllm", "engine.args": "--a,--b=1"}).engine
    assert getattr(found, "args", None) == ("--a", "--b=1")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("# mine\nrun:\n  rounds: 3\n", "write `run:` as `[run]`"),
        ("rounds: 3\n", "write `rounds: 3` as `rounds = 3`"),
        ("name: serial\n", 'write `name: serial` as `name = "serial"`'),
    ],
)
def test_yaml_is_named_with_its_first_line_in_toml(tmp_path: Path, text: str, remedy: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"this is YAML; tailrace reads TOML; {remedy}")):
        load_config(path)
    path.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"this is not TOML \(.*\); correct that line"):
        load_config(path)


WRONG = ("x", "", True, 0.5, -(10**9), 10**9, [], ["x"], [1], {}, {"x": "x"}, "a:b")


def test_no_message_of_a_key_is_in_the_words_of_pydantic() -> None:
    import_all()
    sections, left, found = set[type[Settings]](), [RunConfig], set[str]()
    while left:
        section = left.pop()
        for field in section.model_fields.values():
            left += [each for each in sections_in(field) if each not in sections]
            sections |= {*sections_in(field)}
    for section in sections:
        for name in section.model_fields:
            for value in WRONG:
                try:
                    validated(section, {name: value})
                except ConfigError as why:
                    found |= {
                        line for line in str(why).splitlines() if f"{name} = " in line or f"{name}." in line
                    }
    words = re.compile(r"[Ii]nput |[Ss]hould |; change it|validation|literal\[|tuple\[|constrained|\{\w+\}")
    assert len(found) > 1_000
    assert sorted(line for line in found if words.search(line)) == []


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[model]\npath = 'small'\n[reward]\nfunction = 'mine.py:score'\n[data]\nkind='rows'\npath='d'\n",
    )
    assert config.model is not None and config.model.path == tmp_path / "small"
    assert config.reward.function == f"{tmp_path / 'mine.py'}:score"
    assert config.data is not None and config.model_dump()["data"]["path"] == tmp_path / "d"


def test_a_schedule_s_file_is_relative_too_but_a_module_stays_a_name(tmp_path: Path) -> None:
    text = BASE.replace('"serial"', '"mine.py:odd"')
    (tmp_path / "config.toml").write_text(text)
    assert load_config(tmp_path / "config.toml").schedule["name"] == f"{tmp_path / 'mine.py'}:odd"
    (tmp_path / "config.toml").write_text(BASE.replace('"serial"', '"mine.odd:odd"'))
    assert load_config(tmp_path / "config.toml").schedule["name"] == "mine.odd:odd"


def resumed(folder: Path, overrides: dict[str, str], text: str = "") -> tuple[list[str], list[str]]:
    """The keys that a resumed run changed: those that it may change, and the others."""
    changed = changed_keys(load(folder, text).to_json(), load(folder, text, overrides))
    return [key for key in changed if may_change(key)], [key for key in changed if not may_change(key)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.rounds", "9"),
        ("run.eval_every", "9"),
        ("run.eval_prompts", "9"),
        ("run.checkpoint_every", "9"),
        ("run.step_warning_timeout_s", "9"),
        ("run.step_timeout_s", "9"),
        ("trainer.learning_rate", "1e-3"),
        ("trainer.threads", "2"),
        ("engine.replicas", "2"),
        ("engine.threads", "2"),
        ("reward.workers", "2"),
        ("ledger.flush_s", "1"),
        ("compare.repeats", "9"),
        ("sim.engines.count", "9"),
        ("schedules.april.staleness", "3"),
    ],
)
def test_a_resumed_run_may_be_longer_faster_or_watched_otherwise(
    tmp_path: Path, key: str, value: str
) -> None:
    changes, refused = resumed(tmp_path, {key: value})
    assert refused == []
    assert changes == ([] if key.startswith("schedules.") else [key])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", "1"),
        ("run.group_size", "8"),
        ("schedule.groups_per_step", "4"),
        ("schedule.name", "rolloutpipe"),
        ("algorithm.clip_low", "0.1"),
        ("reward.function", "mine:score"),
        ("model.path", "other"),
    ],
)
def test_a_resumed_run_draws_and_learns_the_same(tmp_path: Path, key: str, value: str) -> None:
    assert resumed(tmp_path, {key: value}) == ([], [key])


def test_the_schedule_s_own_section_counts_as_its_parameters(tmp_path: Path) -> None:
    own = {"schedules.serial.groups_per_step": "4"}
    assert resumed(tmp_path, own) == ([], ["schedule.groups_per_step"])
    assert resumed(tmp_path, {"schedules.serial.groups_per_step": "2"}) == ([], [])


def test_a_refused_change_is_named_with_both_values(tmp_path: Path) -> None:
    old = load(tmp_path, "[schedules.serial]\n").to_json()
    changed = {"run.seed": "1", "run.group_size": "8", "run.rounds": "9", "reward.function": "mine:score"}
    with pytest.raises(ConfigError) as refused:
        check_resumable(old, load(tmp_path, overrides=changed))
    remedy = "change it back, or begin a new run in another --output-dir"
    assert str(refused.value).splitlines() == [
        f"reward.function = 'mine:score': the run was begun without it; {remedy}",
        f"run.group_size = 8: the run was begun with 4; {remedy}",
        f"run.seed = 1: the run was begun with 0; {remedy}",
    ]


def test_a_run_of_an_earlier_version_is_resumed_without_the_keys_that_are_gone(tmp_path: Path) -> None:
    config = load(tmp_path, "[weights]\ntransport = 'filesystem'\n")
    old = json.loads(config.to_json())
    old["run"]["patience_s"] = old["run"].pop("step_warning_timeout_s")
    check_resumable(json.dumps(old), config)


def test_a_run_of_an_earlier_version_is_resumed_with_the_defaults_of_the_keys_that_are_new(
    tmp_path: Path,
) -> None:
    config = load(tmp_path)
    old = json.loads(config.to_json())
    assert old["reward"].pop("batch") == "sample"
    check_resumable(json.dumps(old), config)
    del old["run"]["groups"]  # a section that each run has
    assert changed_keys(json.dumps(old), config) == {}
    with pytest.raises(ConfigError, match=r"^reward.batch = 'group': the run was begun without it;"):
        check_resumable(json.dumps(old), load(tmp_path, overrides={"reward.batch": "group"}))


def test_an_optional_section_with_its_defaults_is_a_change(tmp_path: Path) -> None:
    lora = load(tmp_path, "[trainer.lora]\n")
    assert changed_keys(load(tmp_path).to_json(), lora)["trainer.lora.rank"] == (None, 16)


def test_an_accepted_change_is_returned_with_both_values(tmp_path: Path) -> None:
    old = load(tmp_path).to_json()
    longer = load(tmp_path, overrides={"run.rounds": "9"})
    check_resumable(old, longer)
    assert changed_keys(old, longer) == {"run.rounds": (3, 9)}


@pytest.mark.parametrize("number", ["inf", "nan", "-inf"])
@pytest.mark.parametrize(
    "key", ["trainer.learning_rate", "trainer.critic_learning_rate", "run.step_warning_timeout_s"]
)
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, key: str, number: str) -> None:
    assert message(tmp_path, "", {key: number}).startswith(f"{key} = {number}: it is not finite")


def test_a_config_cannot_be_changed_after_it_was_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).run.rounds = 5  # type: ignore[misc]


def test_how_a_run_is_compared_does_not_make_it_another(tmp_path: Path) -> None:
    changed = changed_keys(load(tmp_path).to_json(), load(tmp_path, "[compare]\nrepeats = 3\n"))
    assert changed == {"compare.repeats": (5, 3)} and may_change("compare.repeats")


JUDGES = """
[[reward.judges]]
kind = "endpoint"
url = "{url}"
model = "m"
template = "{template}"
cache_folder = "answers"

[[reward.judges]]
kind = "local"
name = "own"
path = "judge"
"""


def test_the_paths_of_judges_are_relative_to_the_file(tmp_path: Path) -> None:
    text = JUDGES.format(url="http://host/v1", template="x")
    endpoint, own = load(tmp_path, text).reward.judges
    assert endpoint.model_dump()["cache_folder"] == tmp_path / "answers"
    assert own.model_dump()["path"] == tmp_path / "judge"


def test_a_resumed_run_may_ask_its_judges_elsewhere_but_not_otherwise(tmp_path: Path) -> None:
    old = load(tmp_path, JUDGES.format(url="http://old/v1", template="x")).to_json()
    check_resumable(old, load(tmp_path, JUDGES.format(url="http://new/v1", template="x")))
    with pytest.raises(ConfigError, match=r"reward.judges.0.template = 'y': the run was begun with 'x'"):
        check_resumable(old, load(tmp_path, JUDGES.format(url="http://old/v1", template="y")))


def test_a_mapping_changes_keys_of_a_section_and_replaces_a_table(tmp_path: Path) -> None:
    config = load(tmp_path).changed(
        run={"rounds": 5}, schedule={"name": "april"}, sim={"engines": {"count": 2}}
    )
    assert (config.run.rounds, config.run.group_size, config.sim.engines.count) == (5, 4, 2)
    assert config.schedule == {"name": "april"} and config.run.model_fields_set == {"rounds", "group_size"}


def test_the_config_of_a_run_here_has_its_sections_and_keeps_what_was_set(config_path: Path) -> None:
    config = load_config(config_path)
    live = LiveConfig.of(config.changed(sampling=None))
    assert LiveConfig.of(live) is live and live.sampling.max_completion_tokens > 0
    assert live.toml() == config.changed(sampling=live.sampling).toml()
    with pytest.raises(ConfigError, match=r"data = None: this command needs the section; add \[data\]"):
        LiveConfig.of(PolicyConfig.of(config.changed(data=None)))
