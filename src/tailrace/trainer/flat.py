"""Parameters, or their gradients, as consecutive parts of one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor


def num_elements(parameters: Sequence[Tensor]) -> int:
    """Of the vector that holds them all."""
    return sum(parameter.numel() for parameter in parameters)


def gather_gradients(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """What a backward pass adds to their gradients, it adds to the vector from now on."""
    for parameter, part in zip(parameters, _parts(parameters, vector), strict=True):
        parameter.grad = part


def move(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Their values are kept in the vector from now on."""
    for parameter, part in zip(parameters, _parts(parameters, vector), strict=True):
        part.copy_(parameter.detach())
        parameter.data = part


def follow(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Their values are the vector's from now on."""
    for parameter, part in zip(parameters, _parts(parameters, vector), strict=True):
        parameter.data = part


def _parts(parameters: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
