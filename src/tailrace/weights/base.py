"""What the trainer hands to the engines: a name for weights, not the weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """One published version. `location` says where the tensors are to whoever knows the transport."""

    version: int
    location: str = ""
