"""Each framework in each of its modes (peer_logs.py) is read as what it is; logs that are refused."""

import csv
import json
import tomllib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from peer_logs import LONGEST, MODES, SAMPLES, UNSAID, rows_of, written

from tailrace.cli import main
from tailrace.config import config_of
from tailrace.errors import ConfigError
from tailrace.extras.plan import peers
from tailrace.extras.plan.command import from_run
from tailrace.extras.plan.peer_fit import fit_peer, lognormal
from tailrace.extras.plan.peers import read_peer


@pytest.mark.parametrize("name", MODES)
def test_a_log_of_each_mode_is_read_as_that_mode(name: str, tmp_path: Path) -> None:
    log = read_peer(written(name, tmp_path), **UNSAID)
    assert log.framework == (name if "TRL" in name else name.replace("miles", "slime").split()[0])
    assert log.overlaps == MODES[name].overlaps
    assert len(log.steps) == 3
    assert {key: log.mean(key) for key in MODES[name].expected} == pytest.approx(MODES[name].expected)
    assert log.mean("samples") == pytest.approx(SAMPLES)
    fit_peer(log)


def test_the_default_trainer_of_verl_in_its_asynchronous_mode_is_no_synchronous_one(tmp_path: Path) -> None:
    """timing_s/gen is 2.8 s of 64.8 s there: the wait of the trainer, in which it cannot have generated."""
    log = read_peer(written("verl separate_async", tmp_path))
    assert "training sets the pace; its tokens are up to 3 steps old; they are 1.5 steps old" in log.waits
    engines = fit_peer(log).sim.engines
    assert engines.base_s * log.mean("mean_tokens") == pytest.approx(64.8 - 3)


def test_engines_that_share_the_devices_generate_only_while_the_trainer_waits(tmp_path: Path) -> None:
    log = replace(read_peer(written("verl colocate_async", tmp_path)), in_turn=True)
    assert fit_peer(log).sim.engines.base_s * log.mean("mean_tokens") == pytest.approx(30)


def test_engines_that_are_held_back_generate_in_the_rest_of_the_step(tmp_path: Path) -> None:
    log = read_peer(written("prime-rl", tmp_path))
    assert fit_peer(log).sim.engines.base_s * log.mean("mean_tokens") == pytest.approx(64 - 2 - 4)
    assert "its engines are held back for 4 s of a step; 8 samples or groups a step were too old" in log.waits


def test_a_logged_deviation_decides_how_wide_the_lengths_are(tmp_path: Path) -> None:
    log = read_peer(written("SkyRL sync", tmp_path))
    _, sigma = lognormal(log, int(LONGEST))
    for row in log.steps:
        row["std_tokens"] = 600.0
    assert lognormal(log, int(LONGEST))[1] < sigma - 0.3


@pytest.mark.parametrize(("name", "flag"), [("OpenRLHF sync", "max-tokens"), ("slime sync", "samples")])
def test_what_a_log_does_not_say_is_asked_for(name: str, flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} N"):
        read_peer(written(name, tmp_path))


def test_fit_and_plan_take_what_a_log_does_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(written("OpenRLHF sync", tmp_path))
    words = ["--max-tokens", "9000", "--prompt-tokens", "200", "--output", str(tmp_path / "fitted.toml")]
    assert main(["fit", log]) == 2
    assert "give it: --max-tokens N" in " ".join(capsys.readouterr().err.split())
    assert main(["fit", log, *words]) == 0
    lengths = tomllib.loads((tmp_path / "fitted.toml").read_text())["sim"]["lengths"]
    assert (lengths["max_tokens"], lengths["prompt_tokens"]) == (9000, 200)
    config = config_of(
        {"run": {"rounds": 1, "group_size": 8}, "schedule": {"name": "serial", "groups_per_step": 64}}
    )
    with pytest.raises(ConfigError, match="the planner needs the section"):
        from_run(config, Path(log), max_tokens=9000)


def test_a_log_is_read_row_by_row_and_only_its_figures_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    more = {f"critic/{n}": 1.5 for n in range(400)}
    row = json.dumps(next(rows_of("verl sync", 1)) | more)
    with file.open("w") as lines:
        lines.writelines(row.replace('"step": 1,', f'"step": {step},') + "\n" for step in range(4000))
    tracemalloc.start()
    assert len(read_peer(file).steps) == 3999
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < file.stat().st_size


def test_a_dump_says_how_long_the_longest_response_is(tmp_path: Path) -> None:
    file = written("tinker-cookbook sync", tmp_path)
    with pytest.raises(ConfigError, match="tinker-cookbook does not log max_tokens, and there is no dump"):
        read_peer(file)
    rows = [{"group_idx": n % 2, "steps": [{"ac_len": 900 * n}, {"ac_len": 50}]} for n in range(1, 5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train_rollout_summaries.jsonl").write_text(lines)
    log = read_peer(tmp_path, samples=SAMPLES, max_tokens=None)
    assert log.groups == [[950, 2750], [1850, 3650]]
    assert log.mean("max_tokens") == 3650


def test_every_section_says_where_its_names_are_from() -> None:
    table = tomllib.loads(Path(peers.__file__).with_name("peers.toml").read_text())
    assert all(section["source"] for section in table.values())


def test_what_verl_prints_is_read_as_what_it_logs(tmp_path: Path) -> None:
    lines = []
    for row in rows_of("verl separate_async", 3):
        pairs = " - ".join(f"{name}:np.float64({value})" for name, value in row.items() if name != "step")
        lines.append(
            f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{row['step']} - {pairs}\nTraining Progress:  3%\n"
        )
    file = tmp_path / "run.log"
    file.write_text("".join(lines))
    assert read_peer(file).steps == read_peer(written("verl separate_async", tmp_path, 3)).steps


@pytest.mark.parametrize("value", [str, float])
def test_the_dictionaries_that_trl_prints_are_read(tmp_path: Path, value: type) -> None:
    rows = [{name: value(each) for name, each in row.items()} for row in rows_of("TRL", 3)]
    file = tmp_path / "slurm-12.out"
    file.write_text("".join(f"  5%|#         | 1/20 [00:03<01:02]{row}\nsome words\n" for row in rows))
    assert len(read_peer(file, samples=SAMPLES).steps) == 2


def test_a_table_that_wandb_exports_is_read(tmp_path: Path) -> None:
    rows = [
        {("_step" if name == "step" else name): value for name, value in row.items()}
        for row in rows_of("verl sync", 3)
    ]
    for form in ("{}", "my run - {}"):
        names = {name: "Step" if name == "_step" and "run" in form else form.format(name) for name in rows[0]}
        file = tmp_path / "export.csv"
        with file.open("w", newline="") as lines:
            table = csv.DictWriter(lines, [*names.values()])
            table.writeheader()
            table.writerows({names[name]: value for name, value in row.items()} for row in rows)
        assert read_peer(file).mean("generation_s") == 60


def test_two_runs_are_refused_and_a_resumed_one_is_not(tmp_path: Path) -> None:
    file = written("verl sync", tmp_path)
    again = [row | {"timing_s/step": 130.0} for row in rows_of("verl sync", 4)]
    for rows, runs in ((again[2:], 1), (again, 2)):
        lines = file.read_text()
        file.write_text(lines + "".join(json.dumps(row) + "\n" for row in rows))
        if runs == 1:
            assert read_peer(file).mean("step_s") == pytest.approx((120 + 130 + 130) / 3)
        else:
            with pytest.raises(
                ConfigError, match="two runs: a second one begins with step 1; name the log of one"
            ):
                read_peer(file)
        file.write_text(lines)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in again))
    with pytest.raises(ConfigError, match="two runs"):
        read_peer(tmp_path)


def test_a_row_that_is_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    file = written("verl sync", tmp_path)
    file.write_text(file.read_text()[:-40])
    assert len(read_peer(file).steps) == 2


def test_a_figure_that_is_not_finite_counts_as_not_logged(tmp_path: Path) -> None:
    rows = [
        row | ({"timing_s/gen": float("nan")} if row["step"] == 3 else {}) for row in rows_of("verl sync", 4)
    ]
    rows[3]["timing_s/step"] = float("inf")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step_s"] for row in read_peer(tmp_path / "log.jsonl").steps] == [120]


def test_a_log_of_one_step_says_so_and_one_of_zero_seconds_is_refused(tmp_path: Path) -> None:
    assert (
        "assumed: the only step is like others, although first"
        in read_peer(written("verl sync", tmp_path, 1)).notes
    )
    file = written("TRL async", tmp_path)
    file.write_text(file.read_text().replace('"perf/step_s": 60.0', '"perf/step_s": 0.0'))
    with pytest.raises(ConfigError, match=r"a step \(perf/step_s\) takes 0 s"):
        read_peer(file)


def test_names_of_two_frameworks_are_refused(tmp_path: Path) -> None:
    written("verl sync", tmp_path).rename(tmp_path / "first.jsonl")
    written("SkyRL sync", tmp_path)
    with pytest.raises(ConfigError, match="it has logs of verl and SkyRL"):
        read_peer(tmp_path)
