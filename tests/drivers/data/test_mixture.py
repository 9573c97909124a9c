"""Several sources in one order: shares, places, names."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.data.rows import PAGE, MixedPrompts, shares
from tailrace.drivers.data.settings import MixtureSettings
from tailrace.types import Prompt


class Numbered:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, [index], row_number=index)


def mixed(weights=(3.0, 1.0), seed=0):
    names = [f"s{i}" for i in range(len(weights))]
    return MixedPrompts(names, [Numbered() for _ in weights], weights, seed)


def test_each_source_is_read_in_its_own_order_and_has_its_share_of_every_page():
    prompts = mixed()
    found = [prompts[i] for i in range(2 * PAGE)]
    for name, share in (("s0", 750), ("s1", 250)):
        own = [prompt for prompt in found if prompt.source == name]
        assert [prompt.ids[0] for prompt in own] == list(range(2 * share))
    assert Counter(prompt.source for prompt in found[:PAGE]) == {"s0": 750, "s1": 250}
    assert [prompt.index for prompt in found] == list(range(2 * PAGE))
    assert len({prompt.row_number for prompt in found}) == 2 * PAGE


@given(st.lists(st.integers(0, 10**9), max_size=20), st.integers(0, 3))
@settings(deadline=None)
def test_access_is_random(indices, seed):
    one, other = mixed(seed=seed), mixed(seed=seed)
    assert [one[i] for i in indices] == [other[i] for i in reversed(indices)][::-1]


def test_the_seed_gives_the_order():
    orders = {tuple(mixed(seed=seed)[i].source for i in range(30)) for seed in range(4)}
    assert len(orders) == 4


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=100))
def test_shares_fill_a_page_and_leave_no_source_out(weights):
    found = shares(weights)
    assert sum(found) == PAGE and min(found) >= 1


def test_shares_are_proportional():
    assert shares([1, 1, 1]) == [334, 333, 333]
    assert shares([0.7, 0.2, 0.1]) == [700, 200, 100]
    assert shares([1e9, 1]) == [999, 1]


def source(folder, name, texts, **more):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {"kind": "rows", "name": name, "path": path, **more}


def test_a_mixture_is_opened_from_its_settings_and_keeps_the_splits_apart(tmp_path, plain_tokenizer):
    sources = [
        source(tmp_path, "a", [f"a{i}" for i in range(20)], weight=4.0),
        source(tmp_path, "b", [f"b{i}" for i in range(20)]),
    ]
    settings = MixtureSettings.model_validate({"sources": sources})
    train, held_out = (
        open_prompts(settings, plain_tokenizer, seed=0, split=split) for split in ("train", "eval")
    )
    prompts = [train[i] for i in range(200)]
    assert {prompt.text[0] for prompt in prompts} == {"a", "b"}
    assert all(prompt.text[0] == prompt.source for prompt in prompts)
    assert not {prompt.text for prompt in prompts} & {held_out[i].text for i in range(100)}


def test_two_sources_of_one_name_are_refused(tmp_path):
    twice = [source(tmp_path, "a", ["x"]), source(tmp_path, "a", ["x"])]
    with pytest.raises(ValidationError, match="two sources have the name 'a'"):
        MixtureSettings.model_validate({"sources": twice})
