"""Seeded chance for simulations: numbers that are a function of whole numbers, such as a seed and a row.

SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) costs less
than seeding a generator of the standard library for each sample.
"""

from statistics import NormalDist

_MASK, _GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
_STANDARD = NormalDist()


class Chance:
    """A stream of random numbers.

    Args:
        numbers: what the stream is a function of. Any whole numbers; their order matters.
    """

    def __init__(self, *numbers: int) -> None:
        state = 0
        for number in numbers:
            state = _mixed(state ^ (number & _MASK))
        self._state = state

    def bits(self) -> int:
        """Return a number of 64 bits."""
        bits = _mixed(self._state)
        self._state = (self._state + _GAMMA) & _MASK
        return bits

    def uniform(self) -> float:
        """Return a number above 0 and below 1."""
        return ((self.bits() >> 12) + 0.5) * 2.0**-52

    def normal(self) -> float:
        """Return a number of the standard normal distribution."""
        return _STANDARD.inv_cdf(self.uniform())

    def below(self, limit: int) -> int:
        """Return a whole number from 0 to limit - 1."""
        return self.bits() * limit >> 64


def _mixed(number: int) -> int:
    """Return the output of SplitMix64 in this state."""
    number = (number + _GAMMA) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
