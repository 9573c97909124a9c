"""The memory that keys and values take at any moment."""

import random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.drivers.engine.native.cache import Cache, Sequence
from tailrace.types import SamplingParams

LAYERS, HEADS, DIM = 6, 1, 2


class HeldBytes(TorchDispatchMode):
    """The bytes of all storages that tensor operations have made, and their peak."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and func._schema.returns[0].alias_info is None:  # no view
            reference = StorageWeakRef(made.untyped_storage())
            self.storages[reference.cdata] = reference, made.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now())
        return made

    def now(self):
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        return sum(size for _, size in self.storages.values())


@pytest.mark.parametrize("max_tokens", [1000, 8000])
def test_at_no_moment_does_the_cache_hold_more_than_its_budget_and_one_piece(max_tokens):
    """Sequences come, grow, are suspended, come back and leave at random. One may need the whole cache."""
    budget, chance = 8000, random.Random(0)
    all_rows = [torch.rand(max_tokens, HEADS, DIM) for _ in range(2 * LAYERS)]
    cache = Cache(torch.empty(LAYERS, 0, HEADS, DIM), max_tokens=max_tokens, budget=budget)
    suspended, num_moved, num_resumed = [], 0, 0

    def slot(each):
        start, _ = cache.slots()[each]
        return [piece[start : start + len(each.tokens) - 1] for piece in cache.pieces]

    def write(each):
        for own, rows in zip(slot(each), all_rows, strict=True):
            own.copy_(rows[: len(own)])

    with HeldBytes() as held:
        for number in range(300):
            running, action = cache.sequences(), chance.random()
            if action < 0.3:
                fresh = Sequence(f"{number}", [0, 1], 2, 0, SamplingParams(max_tokens))
                new = suspended.pop() if suspended and chance.random() < 0.7 else fresh
                if cache.has_room(new):
                    if cache.resume(new):
                        num_resumed += 1
                    else:
                        cache.add(new)
                        write(new)
            elif action < 0.8 and running:
                each = chance.choice(running)
                each.tokens = list(range(cache._tier_of[each].capacity + 1))
                write(each)
                if len(each.tokens) > max_tokens or not cache.has_room(each):
                    cache.remove(each)
                else:
                    cache.move(each)
                    num_moved += 1
            elif running:
                each = chance.choice(running)
                if chance.random() < 0.7:
                    cache.suspend(each)
                    suspended.append(each)
                else:
                    cache.remove(each)
                if chance.random() < 0.5:  # several changes may come before keys and values are needed
                    cache.slots()
    for each in cache.sequences():
        assert all(torch.equal(own, rows[: len(own)]) for own, rows in zip(slot(each), all_rows, strict=True))
    assert num_moved > 30 and num_resumed > 3
    budget_bytes = budget * 2 * LAYERS * HEADS * DIM * 4
    assert 0.8 * budget_bytes < held.peak <= budget_bytes * (1 + 1 / (2 * LAYERS))
