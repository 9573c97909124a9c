"""One request as the timeline draws it: of a run on the page, and of a simulation in the playground."""

from tailrace.record.timeline import ServedRequest


def drawn_request(each: ServedRequest, closer: float = 1.0) -> tuple[object, ...]:
    """Return start, end, row, outcome, sample, and the tokens at its start and end.

    Args:
        closer: by which the slots of held-out prompts lie closer to each other.
    """
    outcome = "evaluation" if each.is_evaluation else each.outcome
    slot = (each.slot - 1) / (closer if each.is_evaluation else 1.0)
    times = (round(each.start_s, 4), round(each.end_s, 4), round(slot, 2))
    return (*times, outcome, str(each.sample), each.had, each.num_tokens)
