"""The contract between the trainer, which publishes weights, and the engines, which load them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """A reference to one published version of the policy's weights.

    Args:
        version: the number of the publication; 0 is the initial model.
        location: where the tensors are, in the form that the transport uses (shared memory: a file path).
    """

    version: int
    location: str = ""
