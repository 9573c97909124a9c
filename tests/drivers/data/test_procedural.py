"""Prompts of reasoning-gym: random access, splits that share nothing, lengths, errors in plain words."""

import re
import subprocess
import sys
from collections import Counter
from random import Random
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.drivers.data.open import open_prompts, usable_prompts
from tailrace.drivers.data.procedural import Task, draw_length, is_held_out
from tailrace.drivers.data.settings import ProceduralSettings, TermsSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.importing import install

CHAIN = ProceduralSettings(
    task="chain_sum",
    params={"min_digits": 1, "max_digits": 1},
    lengths={"terms": TermsSettings(median=4, sigma=1.1, minimum=2, maximum=40)},
    template="Q: {question}",
    answer=r"= ?(-?\d+)",
)


def test_a_prompt_is_the_same_whatever_was_asked_before(plain_tokenizer):
    forth, back = (open_prompts(CHAIN, plain_tokenizer, seed=3, split="train") for _ in range(2))
    order = list(range(0, 600, 7))
    expected = {i: forth[i] for i in order}
    assert {i: back[i] for i in reversed(order)} == expected


def test_a_prompt_is_the_same_in_another_process(plain_tokenizer):
    program = (
        "from tests.drivers.data.conftest import character_tokenizer\n"
        "from tests.drivers.data.test_procedural import CHAIN\n"
        "from tailrace.drivers.data.open import open_prompts\n"
        "print(open_prompts(CHAIN, character_tokenizer(None), seed=3, split='train')[1000].text)"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == open_prompts(CHAIN, plain_tokenizer, seed=3, split="train")[1000].text


def test_the_model_reads_the_template_and_the_row_keeps_the_entry(plain_tokenizer):
    prompt = open_prompts(CHAIN, plain_tokenizer, seed=0, split="train")[5]
    assert prompt.index == 5
    assert prompt.text == f"Q: {prompt.row['question']}"
    assert plain_tokenizer.decode(prompt.ids, skip_special_tokens=True) == prompt.text
    assert prompt.ids[0] == plain_tokenizer.bos_token_id
    assert eval(prompt.row["metadata"]["expression"]) == int(prompt.row["answer"])


def test_no_prompt_is_in_both_splits_even_of_different_seeds(plain_tokenizer):
    prompts = open_prompts(CHAIN, plain_tokenizer, seed=0, split="train")
    others = open_prompts(CHAIN, plain_tokenizer, seed=1, split="eval")
    train, held_out = {prompts[i].text for i in range(2000)}, {others[i].text for i in range(300)}
    short = {text for text in train if len(text) < 80}
    assert len(short) > 100
    assert not train & held_out


def test_both_splits_have_the_same_distribution_of_lengths(plain_tokenizer):
    splits = [open_prompts(CHAIN, plain_tokenizer, seed=0, split=split) for split in ("train", "eval")]
    train, held_out = (median(each[i].row["metadata"]["num_terms"] for i in range(500)) for each in splits)
    assert abs(train - held_out) <= 1


@given(st.floats(1, 50), st.floats(0, 2), st.integers(1, 10), st.integers(0, 90), st.integers())
def test_lengths_stay_within_their_limits(middle, sigma, minimum, width, seed):
    terms = TermsSettings(median=middle, sigma=sigma, minimum=minimum, maximum=minimum + width)
    assert minimum <= draw_length(terms, Random(seed)) <= minimum + width


def test_lengths_are_lognormal():
    terms = TermsSettings(median=6, sigma=1.2, minimum=1, maximum=1000)
    random = Random(0)
    lengths = sorted(draw_length(terms, random) for _ in range(20_000))
    assert abs(median(lengths) - 6) <= 0.5
    # One standard deviation of the logarithm above the median: 6 exp(1.2) = 19.9.
    assert 18.5 <= lengths[round(0.8413 * 20_000)] <= 21.5


def test_the_drawn_length_is_the_number_of_terms(plain_tokenizer):
    fixed = TermsSettings(median=9, sigma=0, minimum=1, maximum=20)
    prompts = open_prompts(
        CHAIN.model_copy(update={"lengths": {"terms": fixed}}), plain_tokenizer, seed=0, split="train"
    )
    assert Counter(prompts[i].row["metadata"]["num_terms"] for i in range(50)) == {9: 50}


def test_the_task_scores_the_last_answer_that_the_expression_finds():
    task = Task(CHAIN)
    row = {"question": "", "answer": "-12", "metadata": {}}
    assert task.score("= 7 + 5 = -12", row) == 1.0
    assert task.score("= -12 = 7", row) == 0.0
    assert task.score("-12", row) == 0.0


def test_without_an_expression_the_whole_completion_is_the_answer():
    task = Task(CHAIN.model_copy(update={"answer": None}))
    assert task.score("-12", {"answer": "-12"}) == 1.0
    assert task.score("11", {"answer": "-12"}) == 0.0


TASKS = ["chain_sum", "countdown", "knights_knaves", "mini_sudoku", "maze", "leg_counting", "base_conversion"]


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(TASKS), st.integers(0, 10**6))
def test_a_row_that_crossed_a_process_border_is_scored_as_it_was(plain_tokenizer, task, index):
    data = ProceduralSettings(task=task)
    prompt = open_prompts(data, plain_tokenizer, seed=7, split="train")[index]
    row = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt.row))
    answer = str(row["answer"])
    assert Task(data).score(answer, row) == Task(data).score(answer, prompt.row)
    assert not is_held_out(row["question"])


def test_a_task_with_one_prompt_has_none_to_hold_out(plain_tokenizer):
    one = ProceduralSettings(task="chain_sum", params={"min_terms": 1, "max_terms": 1, "max_digits": 1})
    texts = set()
    for index in range(40):
        for split in ("train", "eval"):
            try:
                texts.add((split, open_prompts(one, plain_tokenizer, seed=0, split=split)[index].text))
            except BadRow as bad:
                assert bad.reason == "no prompt in the split"
    assert len({text for _, text in texts}) == len(texts) <= 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"task": "chain_sums"},
            "data.task = 'chain_sums': reasoning-gym has no such task; did you mean 'chain_sum'",
        ),
        (
            {"params": {"max_digit": 3}},
            "data.params.max_digit = 3: chain_sum has no such parameter; did you mean 'max_dig",
        ),
        ({"params": {"seed": 3}}, "data.params.seed = 3: chain_sum has no such parameter"),
        ({"params": {"max_digits": 0}}, "data.task = 'chain_sum': the task refuses its parameters"),
        ({"params": {"max_digits": "x"}}, "data.task = 'chain_sum': the task refuses its parameters"),
        (
            {"lengths": {"term": CHAIN.lengths["terms"]}},
            "data.lengths.term = 'term': chain_sum has no min_term",
        ),
        (
            {"lengths": {"terms": TermsSettings(median=2, sigma=1, minimum=5, maximum=4)}},
            "data.lengths.terms.minimum = 5: it is larger than the maximum; choose at most 4",
        ),
        ({"template": "Solve."}, "data.template = 'Solve.': the question is not in it"),
        ({"answer": "("}, "data.answer = '(': it is not a regular expression"),
        (
            {"task": "rearc", "params": {}, "lengths": {}},
            "data.task = 'rearc': its scorer needs Python objects",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_a_remedy(plain_tokenizer, change, message):
    with pytest.raises(ConfigError) as raised:
        open_prompts(CHAIN.model_copy(update=change), plain_tokenizer, seed=0, split="train")
    assert str(raised.value).startswith(message)


def test_a_question_is_one_user_message_for_a_model_with_a_chat_template(tokenizer):
    prompt = open_prompts(CHAIN, tokenizer, seed=0, split="train")[5]
    assert prompt.text == f"<b>u:Q: {prompt.row['question']};a:"


def test_a_question_that_is_too_long_is_a_bad_row_and_the_others_are_not(plain_tokenizer):
    short = CHAIN.model_copy(update={"max_prompt_tokens": 90})
    prompts = open_prompts(short, plain_tokenizer, seed=0, split="train")
    reasons = Counter()
    for index in range(40):
        try:
            assert len(prompts[index].ids) <= 90
            reasons["fits"] += 1
        except BadRow as bad:
            reasons[bad.reason] += 1
    assert set(reasons) == {"fits", "prompt too long"}


def test_a_task_whose_questions_never_fit_is_a_config_error(plain_tokenizer):
    prompts = open_prompts(CHAIN, plain_tokenizer, seed=0, split="train", max_context_tokens=4)
    with pytest.raises(ConfigError, match=r"data = .prompt too long: \d+ tokens, at most 3 fit"):
        usable_prompts(prompts, 1)


def test_without_reasoning_gym_the_error_names_the_extra(plain_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=re.escape(install("quickstart"))):
        open_prompts(CHAIN, plain_tokenizer, seed=0, split="train")
