"""Reward functions of TRL and verl, installed from their packages, run unchanged and give the same numbers.

The functions are called twice: as their own trainer calls them, and as reward functions of a config.
"""

import importlib.util
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.importing import import_function

pytestmark = pytest.mark.peers

ROWS = RowsSettings(path=Path("rows.jsonl"))
TRL_COMPLETIONS = [
    r"\boxed{\frac{1}{3}}",
    r"My answer is \boxed{\frac{1}{2}}",
    r"<think> Reasoning </think> The final answer is \boxed{\frac{1}{3}}",
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "",
]
IDS = [[1] * 50, [1, 2, 3, 4], [5] * 90, [5, 5, 5, 5, 5], [], list(range(101))]
TRL_FACTORIES = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

cosine = get_cosine_scaled_reward(max_len=100)
repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
"""


def rewards_of(spec: str, calls: list[Call]) -> list[float]:
    with closing(Scorer.load(RewardSettings(function=spec), ROWS)) as scorer:
        scorer.check_columns(calls[0].row)
        return [scorer(call).reward for call in calls]


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(TRL_FACTORIES)
    return file


@pytest.mark.parametrize(
    "spec",
    [
        *(f"trl.rewards:{name}" for name in ("accuracy_reward", "reasoning_accuracy_reward")),
        "trl.rewards:think_format_reward",
        *(f"FACTORIES:{name}" for name in ("cosine", "repetition", "overlong")),
    ],
)
def test_trls_reward_functions_give_the_same_numbers(spec: str, factories: Path) -> None:
    spec = spec.replace("FACTORIES", str(factories))
    gold = r"\frac{1}{3}"
    # As GRPOTrainer._calculate_rewards calls it.
    messages = [[{"role": "assistant", "content": text}] for text in TRL_COMPLETIONS]
    prompt = [{"role": "user", "content": "1/3?"}]
    expected = import_function(spec, "reward.function")(
        prompts=[prompt] * len(messages),
        completions=messages,
        completion_ids=IDS,
        solution=[gold] * len(messages),
        trainer_state=None,
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
    )
    row = {"prompt": prompt, "solution": gold}
    calls = [
        Call("1/3?", text, ids, "stop", row, given=prompt)
        for text, ids in zip(TRL_COMPLETIONS, IDS, strict=True)
    ]
    assert rewards_of(spec, calls) == expected
    assert len(set(expected)) > 1


SOLUTIONS = [
    "The answer is 72",
    "#### 72",
    "so\n#### 1,234",
    r"\boxed{72}",
    r"Answer: $\frac{1}{2}$",
    r"Therefore \boxed{\frac12}.",
    "<answer>72</answer>",
    "Answer: 72",
    "",
]
VERL_SCORERS = ["gsm8k.py", "math_reward.py", "math_dapo.py", "search_r1_like_qa_em.py"]


def verl_file(name: str) -> Path:
    """A scorer of verl, as a file: the package itself imports ray and tensordict."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations, "`make env-peers`, and PYTHONPATH=.peers"
    return Path(spec.submodule_search_locations[0]) / "utils" / "reward_score" / name


@pytest.mark.parametrize("truth", ["72", "1234", r"\frac{1}{2}"])
@pytest.mark.parametrize("name", VERL_SCORERS)
def test_verls_scorers_give_the_same_numbers(name: str, truth: str) -> None:
    spec = f"{verl_file(name)}:compute_score"
    gold: Any = {"target": [truth]} if name.startswith("search") else truth
    compute_score = import_function(spec, "reward.function")

    def expected(solution: str) -> float:
        result = compute_score(solution, gold)
        return float(result["score"] if isinstance(result, dict) else result)

    row = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"index": 0},
    }
    calls = [Call("?", text, [1], "stop", row, given=row["prompt"]) for text in SOLUTIONS]
    assert rewards_of(spec, calls) == [expected(text) for text in SOLUTIONS]


def test_each_scorer_of_verl_tells_solutions_apart() -> None:
    """So that equal numbers above are not all zeros."""
    right = {"gsm8k.py": 1, "math_reward.py": 3, "math_dapo.py": 7, "search_r1_like_qa_em.py": 6}
    for name, index in right.items():
        gold: Any = {"target": ["72"]} if name.startswith("search") else "72"
        row = {"reward_model": {"ground_truth": gold}}
        calls = [Call("?", SOLUTIONS[each], [1], "stop", row) for each in (index, 0)]
        first, other = rewards_of(f"{verl_file(name)}:compute_score", calls)
        assert first == 1.0 > other
