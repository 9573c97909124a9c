"""Distributions of simulated lengths, and the chance that they are drawn with."""

import json
import math
from functools import partial
from pathlib import Path
from statistics import NormalDist, correlation, fmean

import pytest

from helpers.virtual import EXACT, SETTINGS, change, simulate
from tailrace.config import RunConfig, load_config
from tailrace.errors import ConfigError
from tailrace.record.events import Stepped
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    EmpiricalSettings,
    RecordedSettings,
    SimLengthSettings,
    TableSettings,
    UniformSettings,
)
from tailrace.sim.world import Chance, Lengths, SimPrompts, law_of, read_lengths
from tailrace.types import Group, Sample, SampleId

NORMAL = NormalDist()
UNIFORM = SimLengthSettings(distribution=UniformSettings(min_tokens=10, max_tokens=19))
TABLE = SimLengthSettings(distribution=TableSettings(tokens=(5, 50, 500), shares=(1, 2, 1)))


def sample(prompt: int, number: int = 0) -> Sample:
    group = Group(SimPrompts(2)[prompt], 1, [])
    return Sample(SampleId(prompt, 0, number), group)


def quantiles(settings: SimLengthSettings, *shares: float) -> list[int]:
    law = law_of(settings)
    return [int(law(NORMAL.inv_cdf(share))) for share in shares]


def test_the_generator_gives_the_published_numbers_of_splitmix64() -> None:
    """The first outputs for the seed 0."""
    chance = Chance()
    assert [chance.bits() for _ in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_chance_is_uniform_normal_and_a_function_of_all_its_numbers() -> None:
    drawn = [Chance(7, number).uniform() for number in range(4000)]
    assert abs(fmean(drawn) - 0.5) < 0.015 and 0 < min(drawn) < 0.002 and 0.998 < max(drawn) < 1
    normal = [Chance(7, number).normal() for number in range(4000)]
    assert abs(fmean(normal)) < 0.05 and abs(fmean(z * z for z in normal) - 1) < 0.07
    assert len({Chance(*key).bits() for key in ((1, 2), (2, 1), (1,), (1, 2, 0), (-1, 2))}) == 5
    assert {Chance(number).below(3) for number in range(50)} == {0, 1, 2}


def test_uniform_lengths_have_all_values_between_the_limits_alike() -> None:
    assert quantiles(UNIFORM, 1e-9, 0.05, 0.55, 0.95, 1 - 1e-9) == [10, 10, 15, 19, 19]


def test_a_table_gives_each_length_its_share() -> None:
    assert quantiles(TABLE, 0.01, 0.24, 0.26, 0.74, 0.76, 0.99) == [5, 5, 50, 50, 500, 500]


def test_an_empirical_distribution_has_the_quantiles_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("40\n10\n30\n20\n")
    settings = SimLengthSettings(distribution=EmpiricalSettings(path=path))
    assert quantiles(settings, 1e-12, 0.24, 0.26, 0.51, 0.76, 1 - 1e-12) == [10, 10, 20, 30, 40, 40]


def test_the_samples_of_a_run_are_lengths(tmp_path: Path) -> None:
    for round, tokens in enumerate([[3, 9], [27]]):
        lines = [json.dumps({"id": "0.0/0", "step": round, "num_tokens": number}) for number in tokens]
        (tmp_path / f"round_{round:06d}.jsonl").write_text("\n".join(lines) + "\n")
    assert read_lengths(tmp_path) == [3, 9, 27]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('5\n{"step": 1, "num_to', "line 2 of trace.jsonl is torn or no length"),
        ("5\n\n", "line 2 of trace.jsonl is torn or no length"),
        ("5\n6.5\n", "line 2 of trace.jsonl is torn or no length"),
        ("5\n6\n0\n", "line 3 of trace.jsonl has the length 0"),
        (
            '{"step": 2, "num_tokens": 5}\n{"step": 1, "num_tokens": 5}\n',
            "line 2 of trace.jsonl has step 1 after step 2",
        ),
        ('{"step": 2, "tokens": 5}\n', "line 1 of trace.jsonl is torn or no length"),
        ("", "it has no lengths"),
    ],
)
def test_a_file_that_is_torn_or_unordered_is_refused_with_the_first_bad_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lengths(path)
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_lengths(tmp_path / "missing")


@pytest.mark.parametrize("settings", [UNIFORM, TABLE, SimLengthSettings()])
def test_a_prompt_that_is_long_stays_long(settings: SimLengthSettings) -> None:
    """Two responses to one prompt, and a later attempt of the same sample."""
    lengths = Lengths(change(settings, correlation=0.9), seed=3)
    first = [math.log(lengths(sample(prompt))) for prompt in range(600)]
    second = [math.log(lengths(sample(prompt, 1))) for prompt in range(600)]
    assert 0.75 < correlation(first, second) < 0.95
    again = sample(5)
    again.id = SampleId(5, 2, 0)
    assert lengths(again) == lengths(sample(5))


def test_lengths_drift_with_the_version_in_which_a_sample_began() -> None:
    lengths = Lengths(SimLengthSettings(median_tokens=100, sigma=0.0, drift=4.0), seed=0)
    assert [lengths(sample(0), version) for version in (0, 50, 100)] == [100, 200, 400]
    carried = sample(0)
    carried.grow(7, version=50)
    assert lengths(carried, 100) == 200


def test_a_run_s_responses_drift_with_its_publications() -> None:
    """Three rounds with one publication each: factors of 1, 2 and 4."""
    exact = change(EXACT.lengths, drift=2.0**100)
    schedule = partial(SCHEDULES["serial"], groups_per_round=2, groups_per_step=2)
    outcome = simulate(schedule, SETTINGS, EXACT.model_copy(update={"lengths": exact}))
    ended = [event.samples for event in outcome.events if isinstance(event, Stepped)]
    assert [{sample.num_tokens for sample in samples} for samples in ended] == [{10}, {20}, {40}]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"kind": "uniform", "min_tokens": 9, "max_tokens": 3}, "min_tokens = 9 is more than max_tokens = 3"),
        ({"kind": "table", "tokens": [1, 2], "shares": [1.0]}, "there are 2 tokens, but 1 shares"),
        ({"kind": "table", "tokens": [2, 1], "shares": [1.0, 1.0]}, "tokens are not in ascending order"),
        ({"kind": "table", "tokens": [1, 2], "shares": [0.0, 0.0]}, "all shares are 0"),
    ],
)
def test_an_impossible_distribution_is_refused(section: dict[str, object], problem: str) -> None:
    tree = {"run": {}, "schedule": {"name": "serial"}, "sim": {"lengths": {"distribution": section}}}
    with pytest.raises(ValueError, match=problem):
        RunConfig.model_validate(tree)


def test_paths_of_the_simulation_are_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = "serial"\n[sim.cluster]\nmodel = "Qwen3-4B"\n'
        '[sim.lengths.distribution]\nkind = "empirical"\npath = "lengths.txt"\n'
        '[sim.rewards.judge]\nmodel = "Qwen3-4B"\n'
    )
    sim = load_config(tmp_path / "config.toml").sim
    assert isinstance(sim.lengths.distribution, EmpiricalSettings) and sim.cluster
    assert (sim.lengths.distribution.path, sim.cluster.model) == (tmp_path / "lengths.txt", "Qwen3-4B")
    (tmp_path / "Qwen3-4B").mkdir()
    sim = load_config(tmp_path / "config.toml").sim
    assert sim.cluster and sim.cluster.model == str(tmp_path / "Qwen3-4B")
    assert sim.rewards.judge and sim.rewards.judge.model == str(tmp_path / "Qwen3-4B")


def test_a_recorded_sample_has_its_length_and_others_one_of_them(tmp_path: Path) -> None:
    lines = [
        '{"id":"0.0/0","num_tokens":11}',
        '{"id":"0.1/1","num_tokens":500}',
        '{"id":"2.0/0","num_tokens":13}',
    ]
    (tmp_path / "round_000000.jsonl").write_text("\n".join(lines))
    distribution = RecordedSettings(path=tmp_path)
    lengths = Lengths(SimLengthSettings(distribution=distribution, max_tokens=100), seed=1)
    found = [lengths(sample(prompt, number)) for prompt in range(3) for number in range(2)]
    assert found[:2] + found[4:5] == [11, 100, 13]
    assert {*found[2:4], found[5]} <= {11, 100, 13}


def test_recorded_lengths_need_the_ids_of_samples(tmp_path: Path) -> None:
    (tmp_path / "round_000000.jsonl").write_text("11\n")
    with pytest.raises(ConfigError, match="a line has the id ''"):
        law_of(SimLengthSettings(distribution=RecordedSettings(path=tmp_path)))
