"""The permutations of `numpy.random.default_rng(seed)`, without numpy: a resumed run depends on their order.

`SeedSequence` hashes the numbers of a seed to the state of a generator PCG64 (O'Neill, 2014: XSL-RR of 128
bits), which draws the places of a Fisher-Yates shuffle.
"""

from array import array
from collections.abc import Iterator, Sequence

POOL = 4
"""Words of 32 bits to which a seed is mixed."""
_WORD, _LONG, _STATE = 2**32 - 1, 2**64 - 1, 2**128 - 1
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


def permutation(seed: Sequence[int], size: int) -> "array[int]":
    """Return the numbers below `size`, in the order of `numpy.random.default_rng(seed).permutation(size)`.
    `seed`: numbers of at least 0. A million takes about a second."""
    order, words = array("q", range(size)), _words(seed)
    for place in range(size - 1, 0, -1):
        mask = (1 << place.bit_length()) - 1
        while (other := next(words) & mask) > place:
            pass
        order[place], order[other] = order[other], order[place]
    return order


def _words(seed: Sequence[int]) -> Iterator[int]:
    """Yield words of 32 bits, of each number of the generator the low half first."""
    words = _seed_words(seed)
    high, low, *increment = (words[at] | words[at + 1] << 32 for at in range(0, 2 * POOL, 2))
    odd = (increment[0] << 65 | increment[1] << 1 | 1) & _STATE
    state = ((odd + (high << 64 | low)) * _MULTIPLIER + odd) & _STATE
    while True:
        state = (state * _MULTIPLIER + odd) & _STATE
        folded, turn = (state >> 64 ^ state) & _LONG, state >> 122
        number = folded >> turn | folded << 64 - turn
        yield number & _WORD
        yield number >> 32 & _WORD


def _seed_words(seed: Sequence[int]) -> list[int]:
    """The words of `SeedSequence(seed)` from which a PCG64 begins."""
    given = [number >> shift & _WORD for number in seed for shift in range(0, number.bit_length() or 1, 32)]
    hashed = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in (*given[:POOL], *[0] * (POOL - len(given)))]
    for source in range(POOL):
        for target in (each for each in range(POOL) if each != source):
            pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in given[POOL:]:
        pool = [_mixed(each, hashed(word)) for each in pool]
    hashed = _Hash(0x8B51F9DD, 0x58F38DED)
    return [hashed(word) for word in pool * 2]


class _Hash:
    """Hashes words one after another: its constant changes with each."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self._constant, self._multiplier = constant, multiplier

    def __call__(self, word: int) -> int:
        word ^= self._constant
        self._constant = self._constant * self._multiplier & _WORD
        word = word * self._constant & _WORD
        return word ^ word >> 16


def _mixed(word: int, other: int) -> int:
    word = (0xCA01F9DD * word - 0x4973F715 * other) & _WORD
    return word ^ word >> 16
