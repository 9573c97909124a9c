"""Drafts of the embedded engine: where they come from, how many pay, and what a step keeps of them."""

import pytest
from forced_drafts import ForcedDrafts, make_rows_free
from native_cases import PROMPTS, finish, submit_all

from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.cache import Sequence
from tailrace.drivers.engine.native.drafts import MAX_REST, PLAIN_EVERY, Drafter, StepSeconds
from tailrace.drivers.engine.native.matches import Matches
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams


def test_a_longer_match_goes_before_a_newer_one():
    text = [9, 1, 2, 3, 4, 50, 51, 7, 3, 4, 60, 61, 1, 2, 3, 4]
    matches = Matches([9])
    matches.add(text)
    assert matches.find(text, 3) == ([50, 51, 7], 4)
    text += [8, 3, 4]
    assert matches.find(text, 2) == ([8, 3], 2)
    text.append(99)
    assert matches.find(text, 3) is None


def test_texts_of_one_prompt_and_references_are_searched_while_they_grow():
    first, second = [1, 2, 3], [1, 2, 3]
    matches = Matches([1, 2, 3])
    for each in (first, second):
        matches.add(each)
    assert matches.find(second, 4) is None
    first += [4, 5, 6, 7]
    assert matches.find(second, 8) == ([4, 5, 6, 7], 2)
    matches.refer([[4, 5, 30, 31], [4, 5, 40, 41]])
    second += [4, 5]
    assert matches.find(second, 2) == ([30, 31], 4)  # the best one of those that have all four tokens


def test_the_seconds_of_steps_lie_on_lines_between_measured_ones_and_never_fall():
    seconds = StepSeconds()
    assert seconds(5) == 0.0
    for rows, each in ((1, 2.0), (4, 2.0), (8, 1.0), (16, 10.0)):
        seconds.observe(rows, each)
    assert [seconds(rows) for rows in (1, 6, 8, 12, 16, 99)] == [2.0, 2.0, 2.0, 6.0, 10.0, 10.0]
    for disturbed, expected in ((18.0, 10.0), (18.0, 18.0)):
        seconds.observe(16, disturbed)
        assert seconds(16) == expected


class Requests:
    """Requests of one prompt, each of which repeats what the others have said."""

    def __init__(self, num):
        matches, self.all = Matches([1, 2]), []
        for _ in range(num):
            tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
            matches.add(tokens)
            self.all.append(Sequence("", tokens, 2, 0, SamplingParams(99), matches=matches))

    def proposed(self, drafter, room=8):
        return [len(draft) for draft in drafter.propose(dict.fromkeys(self.all, room)).values()]


def drafter_of(seconds_of_rows, right=None, max_tokens=8):
    drafter = Drafter(max_tokens)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        drafter.seconds.observe(rows, seconds_of_rows(rows))
    for request in Requests(1).all:
        for _ in range(1000 if right is not None else 0):
            drafter.propose({request: 8})
            if drafter._lengths:
                drafter.observe(request, 1, int(right))
    drafter._rest = drafter._last_rest = 0
    drafter._until_plain = drafter._plain_every = PLAIN_EVERY
    return drafter


def test_an_unknown_step_is_at_most_twice_as_wide_as_a_known_one():
    requests, drafter = Requests(2), Drafter(8)
    assert requests.proposed(drafter) == []
    for rows, expected in ((2, [1, 1]), (4, [3, 3]), (8, [7, 7]), (16, [8, 8])):
        drafter.seconds.observe(rows, 1.0)
        drafter._rest, drafter._until_plain = 0, 2
        assert requests.proposed(drafter) == expected


@pytest.mark.parametrize(
    ("seconds", "right", "expected"),
    [
        (lambda rows: 1.0, None, [8, 8]),  # rows cost nothing: all that followed
        (lambda rows: float(rows), None, []),  # a row costs as much as a step of one
        (lambda rows: 1 + rows / 10, None, [2, 2]),
        (lambda rows: 1 + rows / 10, True, [8, 8]),
        (lambda rows: 1 + rows / 10, False, []),
    ],
    ids=["free rows", "dear rows", "half are right", "all are right", "none is right"],
)
def test_as_many_tokens_are_drafted_as_give_the_most_tokens_a_second(seconds, right, expected):
    assert Requests(2).proposed(drafter_of(seconds, right)) == expected


def test_no_draft_is_longer_than_its_room():
    requests = Requests(2)
    drafter = drafter_of(lambda rows: 1.0, max_tokens=3)
    assert requests.proposed(drafter) == [3, 3]
    assert requests.proposed(drafter, room=1) == [1, 1]
    assert requests.proposed(drafter, room=0) == []


def test_drafts_that_do_not_pay_are_tried_again_later(monkeypatch):
    """The engine does not look for matches meanwhile, for longer each time, and then tries one a request."""
    requests, drafter, looked = Requests(2), drafter_of(float), []
    find = Matches.find
    monkeypatch.setattr(Matches, "find", lambda *args: looked.append(1) or find(*args))
    proposed = [requests.proposed(drafter) for _ in range(2 * MAX_REST + 1)]
    assert [place for place, each in enumerate(proposed) if each] == [2 * MAX_REST]
    assert proposed[-1] == [1, 1] and len(looked) == 2 * 8


def test_a_step_without_drafts_is_measured_now_and_then():
    """After 1, 2, 4, ... steps with drafts, at last after each 64."""
    requests, drafter = Requests(1), Drafter(8)
    drafter.seconds.observe(1, 1.0)
    proposed = [requests.proposed(drafter) for _ in range(200)]
    plain = [place for place, each in enumerate(proposed) if not each]
    assert plain == [1, 4, 9, 18, 35, 68, 68 + 65, 68 + 2 * 65]


def test_the_first_drafts_decide_how_many_are_right():
    """After n drafts of which r were right, a share of which nothing was known is (r + 1) / (n + 2)."""
    requests, drafter = Requests(1), Drafter(8)
    drafter.seconds.observe(1, 1.0)
    for num_right in (0, 1, 3):
        drafter.propose({requests.all[0]: 8})
        drafter.observe(requests.all[0], 3, num_right)
        drafter._until_plain = 1
    assert drafter._right[4] == (pytest.approx((0 + 1 + 3 + 1) / (1 + 2 + 3 + 2)), 6)


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_with_drafts_a_request_gets_the_tokens_that_it_would_get_without(make_engine, kind):
    plain, drafting = make_engine(), make_engine()
    drafting._drafter = drafter = ForcedDrafts(kind, drafting)
    for engine in (plain, drafting):
        submit_all(engine, PROMPTS)
    expected, found = finish(plain), finish(drafting)
    for id, output in found.items():
        assert (output.ids, output.finish_reason) == (expected[id].ids, expected[id].finish_reason)
        assert output.behavior_logprobs == pytest.approx(expected[id].behavior_logprobs, abs=1e-5)
    sums, total = drafting.usage().decoded, plain.usage().num_generated
    assert drafting.usage().num_generated == drafting.usage().num_counted == total
    assert (sums.checked, sums.accepted) == (drafter.num_checked, drafter.num_right)
    least, most = {"right": (1.0, 1.0), "wrong": (0.0, 0.0), "random": (0.3, 0.6)}[kind]
    assert least <= sums.accepted / sums.checked <= most and sums.checked > 200


@pytest.mark.parametrize("stop", ["token", "string", "length"])
def test_a_response_that_ends_within_right_drafts_has_nothing_after_its_end(make_engine, stop):
    words = {"token": {"stop_token_ids": (3, 9)}, "string": {"stop": ("B", "Cd")}}.get(stop, {})
    sampling = SamplingSettings(max_completion_tokens=23, temperature=0.8, **words)
    plain, drafting = make_engine(sampling=sampling), make_engine(sampling=sampling)
    drafting._drafter = ForcedDrafts("right", drafting)
    for engine in (plain, drafting):
        submit_all(engine, PROMPTS)
    expected, found = finish(plain), finish(drafting)
    assert {id: (each.ids, each.finish_reason) for id, each in found.items()} == {
        id: (each.ids, each.finish_reason) for id, each in expected.items()
    }
    assert drafting.usage().num_generated == sum(len(each.ids) for each in found.values())
    assert drafting.usage().decoded.accepted > 50


def test_a_reference_that_is_the_response_is_accepted_in_few_steps(make_engine):
    """As in a second epoch with weights that have not changed; the first tokens have no match in it."""
    settings = NativeEngineSettings(drafts="auto")
    request = GenerationRequest("x", PROMPTS["17"], (), 7)
    plain = make_engine()
    plain.submit(request)
    expected = finish(plain)["x"].ids
    engine = make_engine(settings=settings)
    engine._drafter = drafter = Drafter(8)
    make_rows_free(drafter)
    engine.submit(GenerationRequest("x", PROMPTS["17"], (), 7, references=[[70] * 9, expected]))
    assert finish(engine)["x"].ids == expected
    sums = engine.usage().decoded
    assert sums.steps + sums.accepted == len(expected) and sums.accepted > 0.6 * len(expected)


def test_references_of_another_vocabulary_are_not_used_and_said_once(make_engine, capsys):
    engine = make_engine(settings=NativeEngineSettings(drafts="auto"))
    for id in ("a", "b"):
        engine.submit(GenerationRequest(id, PROMPTS["17"], (), 7, references=[[1, 2, 99_999]]))
    ended = finish(engine)
    assert len(ended["a"].ids) == 60 and capsys.readouterr().err.count("beyond the vocabulary") == 1


def test_the_texts_of_a_prompt_are_kept_while_one_of_its_requests_is_there(make_engine):
    """Else a later round with the same seeds would find its own responses."""
    engine = make_engine(settings=NativeEngineSettings(drafts="auto"))
    submit_all(engine, PROMPTS)
    assert len(engine._matches) == len({*map(tuple, PROMPTS.values())})
    finish(engine)
    assert not engine._matches and engine.usage().decoded.checked > 0
