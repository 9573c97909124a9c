"""The ledger: one fate a sample, one fate a group, two sums that must agree."""

import pytest

from tailrace import clock
from tailrace.errors import LedgerError
from tailrace.ledger.ledger import Ledger
from tailrace.record.events import Recorder
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = pytest.mark.virtual


def drawn(ledger: Ledger, prompt: int, lengths: list[int]) -> Group:
    group = Group(Prompt(prompt, [1]), len(lengths), [], num_launched=len(lengths))
    group.samples = [
        Sample(SampleId(prompt, 0, number), group, num_tokens=length) for number, length in enumerate(lengths)
    ]
    group.kept = list(group.samples)
    ledger.draw(group)
    return group


async def settled_books() -> Ledger:
    """10 tokens trained, 20 wasted, 30 held, of three groups; one row was no prompt."""
    ledger = Ledger(Recorder())
    trained, dropped, _ = drawn(ledger, 0, [4, 6]), drawn(ledger, 1, [20]), drawn(ledger, 3, [30])
    ledger.skip()
    ledger.train(trained.samples, 1)
    ledger.waste(dropped.samples[0], "no use")
    ledger.end(dropped, "dropped", "no use")
    return ledger


def test_tokens_are_trained_wasted_or_held() -> None:
    ledger = clock.run(settled_books(), virtual=True)
    totals = ledger.totals
    assert (totals.trained_tokens, totals.wasted_tokens, ledger.held_tokens) == (10, {"no use": 20}, 30)
    assert totals.groups == {"trained": 1, "dropped": 2} and totals.num_drawn == 4
    ledger.check(num_generated=60)


@pytest.mark.parametrize("num_generated", [59, 61])
def test_a_token_too_many_or_too_few_is_found_and_the_sums_are_shown(num_generated: int) -> None:
    ledger = clock.run(settled_books(), virtual=True)
    said = f"gained {num_generated} tokens, the ledger knows 60: trained 10, masked 0, held 30"
    with pytest.raises(LedgerError, match=said):
        ledger.check(num_generated)


def test_a_prompt_that_vanished_is_found() -> None:
    ledger = clock.run(settled_books(), virtual=True)
    del ledger.active[3]
    ledger.totals.trained_tokens += 30
    said = "4 prompts were drawn, the ledger knows 0 active and dropped 2, trained 1"
    with pytest.raises(LedgerError, match=said):
        ledger.check(60)


async def test_nothing_ends_twice() -> None:
    ledger = Ledger(Recorder())
    group = drawn(ledger, 0, [4])
    ledger.train(group.samples, 1)
    with pytest.raises(LedgerError, match=r"sample 0\.0/0 ended twice: trained, then late"):
        ledger.waste(group.samples[0], "late")
    with pytest.raises(LedgerError, match="prompt 0 ended twice: trained, then dropped"):
        ledger.end(group, "dropped", "late")


async def test_a_group_whose_samples_train_apart_ends_with_the_last_of_them() -> None:
    ledger = Ledger(Recorder())
    group = drawn(ledger, 0, [4, 5, 6])
    ledger.waste(group.samples[1], "reward raised")
    ledger.train(group.samples[:1], 1)
    assert group.fate is None
    ledger.train(group.samples[2:], 2)
    assert (group.fate, ledger.active) == ("trained", {})
