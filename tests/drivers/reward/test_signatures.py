"""The signatures of TRL and verl beside our own: recognised, called, and their results read."""

import inspect
import re
from contextlib import closing

import numpy as np
import pytest
import torch

from tailrace.drivers.data.settings import ProceduralSettings
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import RewardFunction, Scorer, recognise
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings
from tailrace.errors import ConfigError, RewardFailed
from tailrace.types import Group, Prompt, Sample, SampleId

MESSAGES = [{"role": "user", "content": "1+1"}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


def one(function, **settings):
    return RewardFunction(function, FunctionSettings(function="mine.py:f", **settings), "reward.function")


def scores_of(*functions, completion="2", row=None, **call):
    loaded = [each if isinstance(each, RewardFunction) else one(each) for each in functions]
    with closing(Scorer(loaded)) as scorer:
        return scorer(Call("q", completion, [5, 6], "stop", row or {}, **call))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda prompt, completion, answer: 0, "tailrace"),
        (lambda completion_ids, **columns: 0, "tailrace"),
        (lambda completions, solution, **kwargs: 0, "trl"),
        (lambda prompts, labels: 0, "trl"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: 0, "verl"),
        (lambda model_output, ground_truth: 0, "verl"),
        (lambda predict_str, ground_truth: 0, "verl"),
        (lambda model_output, answer: 0, "tailrace"),
    ],
)
def test_a_signature_is_recognised_from_the_parameters(function, name):
    assert recognise(inspect.signature(function)) == name


def test_a_result_that_is_annotated_as_a_list_shows_trls_signature():
    def plain(completion_ids, **kwargs) -> list[float]: ...

    def optional(completion_ids: "list[list[int]]", **kwargs) -> "list[float | None]": ...

    def number(completion_ids, **kwargs) -> float: ...

    found = [recognise(inspect.signature(each)) for each in (plain, optional, number)]
    assert found == ["trl", "trl", "tailrace"]


def test_a_function_of_trls_signature_gets_lists_of_one():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
        return [float(trainer_state.global_step)]

    row = {"prompt": "1+1", "completion": "gold", "answer": "2"}
    assert scores_of(reward, row=row, given="1+1", version=3).reward == 3.0
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra"))
    assert seen == {"prompts": ["1+1"], "completions": ["2"], "ids": [[5, 6]], "answer": ["2"]}


def test_completions_are_chat_messages_where_the_prompt_is():
    def reward(prompts, completions):
        assert prompts == [MESSAGES]
        return [float(completion[0]["content"]) for completion in completions]

    assert scores_of(reward, given=MESSAGES).reward == 2.0


BEGUN = Prompt(0, [1], "..a:So", {}, given=[*MESSAGES, {"role": "assistant", "content": "So"}], opened="So")
THINKS = Prompt(0, [1], "..a:<think>\n", {}, given=MESSAGES, opened="<think>\n")


def call_of(prompt, text):
    sample = Sample(SampleId(0, 0, 0), Group(prompt, 1, []))
    sample.text = text
    return Call.of(sample)


@pytest.mark.parametrize(("prompt", "content"), [(BEGUN, "So 2"), (THINKS, "<think>\n 2")])
def test_a_turn_that_the_prompt_has_begun_is_whole_in_trls_messages(prompt, content):
    def reward(prompts, completions):
        assert prompts == [MESSAGES]
        assert completions == [[{"role": "assistant", "content": content}]]
        return [1.0]

    assert Scorer([one(reward)])(call_of(prompt, " 2")).reward == 1.0


def test_what_the_prompt_has_of_the_turn_is_an_argument():
    def reward(completion, completion_prefix):
        return float((completion_prefix, completion) == ("<think>\n", " 2"))

    assert Scorer([one(reward)])(call_of(THINKS, " 2")).reward == 1.0


def test_the_turns_of_an_episode_are_chat_messages_where_the_prompt_is():
    said = [
        {"role": "assistant", "content": "1+1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]

    def roles(completions):
        return [float([each["role"] for each in completions[0]].count("tool"))]

    def text(completions):
        return [float(completions[0])]

    assert scores_of(roles, given=MESSAGES, messages=said).reward == 1.0
    assert scores_of(text, given="1+1", messages=said).reward == 2.0


def test_an_asynchronous_function_of_trls_signature_is_awaited():
    async def reward(completions):
        return [1.5 for _ in completions]

    assert scores_of(reward).reward == 1.5


@pytest.mark.parametrize("result", [[0.5], (0.5,), np.array([0.5]), torch.tensor([0.5])])
def test_lists_tuples_and_tensors_of_one_are_read(result):
    assert scores_of(lambda completions: result).reward == 0.5


@pytest.mark.parametrize("result", [0.5, [], [0.5, 0.5]])
def test_what_is_no_list_of_one_is_a_defect(result):
    with pytest.raises(RewardFailed) as failed:
        scores_of(lambda completions: result)
    assert (failed.value.reason, failed.value.is_defect) == ("not a list of one", True)


def test_a_list_from_a_function_of_our_signature_is_a_defect_that_names_the_remedy():
    with pytest.raises(RewardFailed, match="set signature = 'trl'") as failed:
        scores_of(lambda completion_ids: [1.0])
    assert failed.value.is_defect
    assert scores_of(one(lambda completion_ids: [len(completion_ids[0])], signature="trl")).reward == 2.0


def test_a_function_that_does_not_apply_is_left_out_of_the_sum():
    def none(completions):
        return [None]

    def half(completion):
        return 0.5

    def two(completions, log_metric, log_extra):
        log_metric("length", 3)
        log_extra("gold", ["x"])
        return [2.0]

    scores = scores_of(none, half, one(two, weight=-1.0))
    assert scores.reward == 0.5 - 2.0
    assert scores.metrics == {"half": 0.5, "two": 2.0, "two/length": 3.0}
    assert scores.columns == {"two/gold": "x"}
    with pytest.raises(RewardFailed, match="not applicable"):
        scores_of(none)


def test_a_function_scores_the_samples_of_its_sources_alone():
    first = one(lambda completion: 1.0, name="first", sources=("a", "b"))
    second = one(lambda completion: 10.0, name="second", sources=("b",))
    assert [scores_of(first, second, source=source).reward for source in ("a", "b")] == [1.0, 11.0]


def test_a_function_of_verls_signature_gets_its_four_arguments_and_no_other_column():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, score=1.0, **kwargs):
        assert (data_source, extra_info, kwargs) == ("openai/gsm8k", {"index": 7}, {})
        return score * (solution_str == ground_truth)

    assert scores_of(compute_score, row={**VERL_ROW, "score": 9.0, "other": 1}).reward == 1.0
    changed = one(compute_score, arguments={"score": 3.0})
    assert scores_of(changed, row=VERL_ROW).reward == 3.0


def test_the_result_of_verls_signature_may_be_a_dict_a_tuple_or_of_a_batch():
    def details(solution_str, ground_truth):
        return {"score": -1.0, "acc": False, "pred": solution_str}

    def batch(data_sources, solution_strs, ground_truths, extra_infos):
        return [len(each) for each in solution_strs]

    scores = scores_of(details, row=VERL_ROW)
    assert (scores.reward, scores.metrics, scores.columns) == (
        -1.0,
        {"details/acc": 0.0},
        {"details/pred": "2"},
    )
    assert scores_of(lambda solution_str: (0.5, "why"), row=VERL_ROW).reward == 0.5
    assert scores_of(batch, row=VERL_ROW, completion="abc").reward == 3.0
    with pytest.raises(RewardFailed, match="no 'score'"):
        scores_of(lambda solution_str: {"acc": 1.0})


@pytest.mark.parametrize(
    ("function", "columns", "said"),
    [
        (
            lambda completions, solution: [],
            ["answer"],
            "its parameter 'solution' is no column of the data (columns: answer); it was taken for TRL's",
        ),
        (lambda solution_str, ground_truth: 0, ["answer"], "its parameter 'ground_truth' is no column"),
        (lambda data_source, solution_str: 0, ["reward_model"], "its parameter 'data_source' is no column"),
    ],
)
def test_columns_that_a_signature_needs_and_the_data_lack_are_refused(function, columns, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        one(function).check_columns(columns)


def test_columns_and_arguments_satisfy_the_parameters():
    one(lambda completions, solution, log_extra: []).check_columns(["solution"])
    one(lambda data_source, solution_str, ground_truth: 0).check_columns(["data_source", "reward_model"])
    one(lambda completion, scale: 0, arguments={"scale": 2.0}).check_columns([])
    with pytest.raises(ConfigError, match=r"reward.function.arguments = 'scala': the function has no such"):
        one(lambda completion, scale=1: 0, arguments={"scala": 2.0}).check_columns([])


def test_the_description_shows_what_was_understood():
    def reward(completions, solution, **kwargs): ...

    assert one(reward, weight=0.5).describe() == (
        "reward (weight 0.5): TRL's signature, called with lists of one, "
        "given completions, solution, all columns"
    )


def test_functions_of_one_name_are_refused():
    same = FunctionSettings(function="exact_match")
    data = ProceduralSettings(task="chain_sum")
    with pytest.raises(ConfigError, match="'exact_match': 2 functions have this name"):
        Scorer.load(RewardSettings(functions=(same, same)), data)
    named = FunctionSettings(function="exact_match", name="other")
    scorer = Scorer.load(RewardSettings(functions=(same, named)), data)
    assert [each.name for each in scorer.functions] == ["exact_match", "other"]


def test_function_and_functions_exclude_each_other():
    with pytest.raises(ValueError, match="function and functions are both set"):
        RewardSettings(function="math", functions=(FunctionSettings(function="math"),))
