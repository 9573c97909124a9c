"""Parameters, or their gradients, as consecutive parts of one vector."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def num_elements(parameters: Sequence[Tensor]) -> int:
    """Of the vector that holds them all."""
    return sum(parameter.numel() for parameter in parameters)


def halves(parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """As they lie in a vector, one half behind the other: matrices, which weight decay applies to, then norms
    and biases."""
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.ndim >= 2}
    return [matrices, {name: p for name, p in parameters.items() if name not in matrices}]


def gather_gradients(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """What a backward pass adds to their gradients, it adds to the vector from now on."""
    for parameter, part in zip(parameters, parts_of(parameters, vector), strict=True):
        parameter.grad = part


def move(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Their values are kept in the vector from now on."""
    for parameter, part in zip(parameters, parts_of(parameters, vector), strict=True):
        part.copy_(parameter.detach())
        parameter.data = part


def follow(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Their values are the vector's from now on."""
    for parameter, part in zip(parameters, parts_of(parameters, vector), strict=True):
        parameter.data = part


def parts_of(parameters: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Those of the vector that belong to each, in their shapes."""
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
