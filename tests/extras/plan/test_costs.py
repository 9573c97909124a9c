"""What commands print of costs: simulate, compare, plan, and a live run with its budget."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from helpers.small_run import num_steps, train_here
from tailrace.cli import main
from tailrace.contracts.engine import counted_tokens
from tailrace.extras.view.run import open_runs
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger

PLAN = Path(__file__).parents[3] / "examples" / "cluster_plan.toml"
SIMULATED = """
run = { rounds = 3, group_size = 4 }
schedule = { name = "serial", groups_per_round = 8, groups_per_step = 2 }
sim.engines.count = 2
[prices]
currency = "EUR"
engine_hour = 36.0
trainer_hour = 18.0
"""
RATE = (2 * 36.0 + 18.0) / 3600
"""The cost of a second of the simulation."""


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    path = tmp_path / "sim.toml"
    path.write_text(SIMULATED)
    return path


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def line_of(out: str, label: str) -> str:
    (line,) = (line for line in out.splitlines() if label in line)
    return line


def test_a_simulation_prints_its_cost_and_that_of_a_round(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = simulated.parent / "out"
    assert main(["simulate", str(simulated), "--all", "--output-dir", str(folder)]) == 0
    out, rows = capsys.readouterr().out, rows_of(folder)
    end_s = max(row.get("round/end_s", 0.0) for row in rows)
    of_rounds = sum(row.get("round/cost", 0.0) for row in rows)
    assert of_rounds == pytest.approx(end_s * RATE)
    assert f"{of_rounds / 3:,.4f}" in line_of(out, "cost a round")
    assert f"{1000 * of_rounds / 96:,.4f}" in line_of(out, "cost per 1,000 samples")
    cost = json.loads((folder / "summary.json").read_text())["cost"]
    assert cost == rows[-1]["cost/total"] >= of_rounds
    assert f"cost      {cost:,.4f} EUR\n" in out


def test_a_simulation_without_prices_prints_and_writes_no_cost(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.write_text(SIMULATED.partition("[prices]")[0])
    folder = simulated.parent / "out"
    assert main(["simulate", str(simulated), "--all", "--output-dir", str(folder)]) == 0
    assert "cost" not in capsys.readouterr().out.replace("costs", "")
    assert not [name for row in rows_of(folder) for name in row if "cost" in name]
    assert "prices" not in (folder / "config.toml").read_text()


def test_the_budget_of_a_simulation_ends_it_and_a_tiny_one_is_refused(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = simulated.parent / "out"
    main(["simulate", str(simulated), "--output-dir", str(folder)])
    costs = [row["cost/total"] for row in rows_of(folder) if "loss" in row]
    budget = (costs[5] + costs[6]) / 2
    words = ["simulate", str(simulated), "--output-dir", str(folder), "--prices.budget"]
    capsys.readouterr()
    assert main([*words, str(budget)]) == 0
    assert num_steps(folder) == 7
    assert f"the budget of {budget:g} EUR is spent: the run has cost" in capsys.readouterr().out
    assert main([*words, str(costs[0] / 2)]) == 2
    assert "it is spent within the first round; raise it" in capsys.readouterr().err


def test_a_race_prints_the_costs_of_every_schedule_and_has_no_budget(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(simulated), "--repeats", "1", "--json", str(simulated.parent / "race.json")]
    assert main([*words, "--prices.budget", "0.001"]) == 0
    out = capsys.readouterr().out
    race = json.loads((simulated.parent / "race.json").read_text())["schedules"]
    for name in ("serial", "rolloutpipe"):
        assert f"{race[name]['round_cost']:,.4f} EUR" in line_of(out, "cost a round")
        assert f"{race[name]['cost_per_1000_samples']:,.4f} EUR" in line_of(out, "cost per 1,000 samples")
        round_cost = race[name]["cost_per_1000_samples"] * 32 / 1000
        assert race[name]["round_cost"] == pytest.approx(round_cost)
    assert race["rolloutpipe"]["round_cost"] < race["serial"]["round_cost"]


def test_a_race_without_prices_has_no_cost(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated.write_text(SIMULATED.partition("[prices]")[0])
    words = ["compare", str(simulated), "--repeats", "1", "--json", str(simulated.parent / "race.json")]
    assert main(words) == 0
    assert "cost a round" not in capsys.readouterr().out
    race = json.loads((simulated.parent / "race.json").read_text())["schedules"]
    assert race["serial"]["round_cost"] is None


def test_the_planner_prints_costs_beside_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all devices cost the same, cost follows from time."""
    small = {"run.group_size": 2, "schedule.groups_per_round": 2, "schedule.groups_per_step": 2}
    small |= {
        "sim.cluster.devices": 2,
        "sim.cluster.model": "Qwen3-1.7B",
        "plan.steps": 16,
        "plan.max_lag": 1,
    }
    prices = {"prices.engine_hour": 36, "prices.trainer_hour": 36, "prices.budget": 1}
    words = [word for key, value in {**small, **prices}.items() for word in (f"--{key}", str(value))]
    assert main(["plan", str(PLAN), "--json", str(tmp_path / "plan.json"), *words]) == 0
    out = capsys.readouterr().out
    best, *_ = json.loads((tmp_path / "plan.json").read_text())["ranking"]
    second = 2 * 36 / 3600
    assert best["cost_per_1000_samples"] == pytest.approx(1000 * second / best["samples_per_s"], rel=0.05)
    assert f"{best['cost_per_1000_samples']:,.4f}" in out
    assert "cost: of 1,000 samples, in USD" in " ".join(out.split())


def test_a_live_run_ends_when_its_budget_is_spent_and_goes_on_with_a_larger_one(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trained token costs 1, so that the step of the end is known."""
    folder = config_path.parent / "out"
    words = ["--prices.training", "1e6", "--prices.engine_hour", "1e-6", "--prices.budget"]
    assert train_here(config_path, *words, "60") == 0
    rows = [row for row in rows_of(folder) if "loss" in row]
    trained = [row["tokens/trained"] for row in rows]
    assert sum(trained[:-1]) < 60 <= sum(trained)
    out, err = capsys.readouterr()
    checkpoint = sorted((folder / "checkpoints").iterdir())[-1]
    assert "tailrace: the budget of 60 USD is spent: the run has cost" in err
    assert f"; saved {checkpoint}; raise prices.budget, then --resume" in err
    assert "0.0000 left of 60.0000" in line_of(out, "cost  ")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["cost"] == pytest.approx(sum(trained), abs=1e-3)
    assert (folder / "model" / "config.json").exists()

    steps, ledger = num_steps(folder), (folder / "ledger.sqlite").read_bytes()
    assert train_here(config_path, *words, "60", "--resume") == 2
    assert "the budget of 60 USD is spent: the run has cost" in capsys.readouterr().err
    assert (num_steps(folder), (folder / "ledger.sqlite").read_bytes()) == (steps, ledger)

    assert train_here(config_path, *words, "1e5", "--prices.sampling", "1e6", "--resume") == 0
    capsys.readouterr()
    cost = json.loads((folder / "summary.json").read_text())["cost"]
    with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
        totals = totals_of(read_ledger(store))
    tokens = totals.trained_tokens + totals.undone_tokens + counted_tokens(folder / "counts")
    assert cost == pytest.approx(tokens + totals.seconds / 3600 * 1e-6, rel=1e-12)
    assert main(["inspect", str(folder), "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)["cost"]
    assert bill["total"] == cost == sum(item["amount"] * item["price"] for item in bill["items"])
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "million tokens trained" in shown and "million tokens prefilled" not in shown
    assert f"cost      {cost:,.4f} USD, {1e5 - cost:,.4f} left of 100,000.0000\n" in shown
    (run,) = open_runs([folder])
    assert run.figures()["cost"] == f"{cost:,.4f} USD, {1e5 - cost:,.4f} left of 100,000.0000"
