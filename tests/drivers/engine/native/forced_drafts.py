"""Drafts that a test forces on an engine."""

import random

from helpers.tiny_models import VOCABULARY
from tailrace.drivers.engine.native.drafts import SIZES, Drafter
from tailrace.drivers.engine.native.sampler import draw, noise_keys

KINDS = ("wrong", "right", "random")
OF_STEPS = (
    "test_native_steps",
    "test_native_reference",
    "test_native_drafts",
    "test_native_fuzz",
    "test_decode_steps_are_summed_with_their_requests_and_positions",
    "test_a_step_prefills_no_more_than_its_budget_and_a_longer_context_in_parts",
    "test_a_long_prompt_does_not_stop_the_others",
    "test_an_id_that_is_being_served_is_refused_and_free_again_afterwards",
    "test_no_more_run_than_may_and_the_rest_wait_in_order",
    "test_a_pinned_request_ends_under_its_version_while_another_one_is_loaded",
    "test_a_request_without_a_pin_goes_on_under_the_new_version",
    "test_an_aborted_request_takes_its_cache_back_only_under_its_pin",
    "test_an_aborted_request_goes_on_without_being_computed_again",
    "test_over_new_weights_the_kept_cache_is_the_old_one_s",
    "test_recomputing_forgets_what_is_parked",
    "test_a_request_that_comes_back_different_is_computed",
    "test_load_reports_what_the_old_version_produced",
    "test_recomputed_cache_equals_a_forward_of_the_new_weights",
    "test_kept_cache_equals_a_forward_that_mixes_the_weights_the_same_way",
    "test_recomputing_is_counted",
    "test_resumed_on_another_replica_gives_the_tokens_of_an_undisturbed_run",
    # Their log-probs are compared to the last bit, which depends on the rows of a step.
    "test_asleep_it_holds_neither_weights_nor_cache_and_awake_it_generates_the_same",
    "test_weights_that_come_after_it_woke_are_those_it_uses",
    "test_what_broken_weights_left_in_the_cache_harms_nobody_under_better_ones",
)
"""Modules and tests that say what an engine has after so many steps."""


def make_rows_free(drafter):
    """Steps of all rows take as long, and none is measured."""
    for rows in SIZES:
        drafter.seconds.observe(rows, 1.0)
    drafter.seconds.observe = lambda rows, seconds: None


class ForcedDrafts(Drafter):
    """Up to four tokens of each request. right: those that will be drawn, computed one after another without
    the cache of the request. wrong: the first is none of them, the others are any. random: of either kind."""

    def __init__(self, kind, engine):
        super().__init__(4)
        self._kind, self._engine, self._chance = kind, engine, random.Random(0)
        self.num_right = self.num_checked = 0

    def propose(self, rooms):
        return {each: draft for each, room in rooms.items() if (draft := self._draft(each, min(room, 4)))}

    def observe(self, request, num_drafted, num_right):
        self.num_right, self.num_checked = self.num_right + num_right, self.num_checked + num_drafted

    def _draft(self, sequence, num):
        ids: list[int] = []
        while len(ids) < num:
            if self._kind == "wrong" and ids:
                ids.append(self._chance.randrange(VOCABULARY))
                continue
            id = self._next(sequence, [*sequence.tokens, *ids])
            if self._kind == "wrong" or (self._kind == "random" and self._chance.random() < 0.3):
                id = (id + self._chance.randrange(1, VOCABULARY)) % VOCABULARY
            ids.append(id)
        return ids

    def _next(self, sequence, tokens):
        engine, place = self._engine, len(tokens) - sequence.num_prompt
        pieces = [piece.new_empty(len(tokens), *piece.shape[1:]) for piece in engine._cache.pieces]
        adapted = [(engine._adapters[engine._version_of(sequence)], None)]
        parts = [((0, len(tokens)), range(len(tokens)))]
        x = engine._model.read(pieces, parts, engine._tensor(tokens), adapted)
        key = noise_keys(*engine._tensor([[sequence.noise_stream], [place]]))
        greedy = [0] if sequence.greedy else ()
        return int(draw(engine._model.logits(x[-1:]), key, [sequence.sampling], greedy).ids)
