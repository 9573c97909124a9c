"""What a decode step computes besides matrix products, compiled for the CPU: float32, any lengths.

The matrix products stay with torch (MKL), which beat those that were tried here. The rest is bound by reading
the cache, so each kernel reads it once and pads nothing.

Compiled by numba when this module is first imported on a machine, which takes about ten seconds; later
imports load the result from a cache beside this file, or, where that cannot be written, in the user's
cache folder. Processes may do so at the same time.

Loops index whole arrays, because a slice costs a reference count, and run along the last axis, because
that is what the compiler vectorises. Unrolled by hand is what keeps a row of memory in registers.

Suffixes as in model.py and cache.py; G query heads share a key-value head.
"""

from collections.abc import Callable
from math import log
from typing import Any

import numba
import numpy as np
from numba import float32, int32
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
_SUMS = {"reassoc", "nsz", "contract", "arcp"}
"""Sums may be reordered, which vectorises them; infinities and NaN keep their meaning."""


def _kernel(*signature: str, fastmath: bool | set[str] = _SUMS) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once for the types of the signature; without one, for a caller in this file."""

    def compiled(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"fastmath": fastmath, "error_model": "numpy"}
        try:
            return numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # No folder can be written: each process compiles for itself.
            return numba.njit(*signature, **options)(function)

    return compiled


@_kernel()
def _exp_parts(x: float) -> tuple[float, float]:
    """exp(x) = 2^whole * mantissa, relative error (2 + |x|) * 1e-7, for results from 2^-126 to 2^126."""
    exponent = min(max(x * float32(1.44269504), float32(-126.0)), float32(126.0))
    whole = np.floor(exponent)
    f = exponent - whole
    # 2^f on [0, 1): least relative error among polynomials of degree 6.
    p = float32(2.161292654e-4)
    p = p * f + float32(1.246784327e-3)
    p = p * f + float32(9.675451892e-3)
    p = p * f + float32(5.548528047e-2)
    p = p * f + float32(2.402293056e-1)
    p = p * f + float32(6.931470444e-1)
    return whole, p * f + float32(1.0)


@_kernel()
def _bits(whole: float) -> Any:
    """The bits of the float 2^whole."""
    return int32((whole + float32(127.0)) * float32(8388608.0))


@_kernel("(float32[:, ::1], float32, float32[:, ::1])")
def normalize(x: Floats, epsilon: float, out: Floats) -> None:
    """x / sqrt(|x|^2 + epsilon) of each row [T, hidden]."""
    num_rows, width = x.shape
    for row in range(num_rows):
        square = float32(0.0)
        for i in range(width):
            square += x[row, i] * x[row, i]
        scale = float32(1.0) / np.sqrt(square + epsilon)
        for i in range(width):
            out[row, i] = x[row, i] * scale


@_kernel("(float32[:, ::1], float32[:, ::1], int32[::1])")
def silu_times(gate: Floats, up: Floats, scratch: NDArray[np.int32]) -> None:
    """gate = silu(gate) * up, in place, [T, intermediate]; scratch: [intermediate]."""
    powers = scratch.view(np.float32)
    num_rows, width = gate.shape
    for row in range(num_rows):
        for i in range(width):
            x = gate[row, i]
            whole, mantissa = _exp_parts(-x)
            scratch[i] = _bits(whole)
            up[row, i] *= x
            gate[row, i] = mantissa
        for i in range(width):
            gate[row, i] = up[row, i] / (float32(1.0) + gate[row, i] * powers[i])


@_kernel()
def _place(
    qkv: Floats,
    row: int,
    gains: Floats,
    epsilon: float,
    rotations: Floats,
    position: int,
    keys: Floats,
    values: Floats,
    layer: int,
    slot: int,
) -> None:
    """Normalise and rotate the q and k of a row in place; write its k and v into the cache."""
    num_kv, dim = keys.shape[2], keys.shape[3]
    num_rotated = qkv.shape[1] - num_kv
    for head in range(num_rotated):
        if len(gains):
            square = float32(0.0)
            for d in range(dim):
                square += qkv[row, head, d] * qkv[row, head, d]
            scale = float32(1.0) / np.sqrt(square + epsilon)
            for d in range(dim):
                qkv[row, head, d] *= scale * gains[head, d]
        for pair in range(dim // 2):
            a, b = qkv[row, head, 2 * pair], qkv[row, head, 2 * pair + 1]
            cos, sin = rotations[position, pair, 0], rotations[position, pair, 1]
            qkv[row, head, 2 * pair] = a * cos - b * sin
            qkv[row, head, 2 * pair + 1] = a * sin + b * cos
    for kv in range(num_kv):
        for d in range(dim):
            keys[layer, slot, kv, d, position] = qkv[row, num_rotated - num_kv + kv, d]
            values[layer, slot, kv, position, d] = qkv[row, num_rotated + kv, d]


@_kernel()
def _score(
    qkv: Floats, row: int, keys: Floats, layer: int, slot: int, kv: int, length: int, scores: Floats
) -> None:
    """scores[g, j] = q_g . k_j for the G query heads of a key-value head; scores: [G, at least length]."""
    num_group, dim = scores.shape[0], keys.shape[3]
    for g in range(num_group):
        for j in range(length):
            scores[g, j] = float32(0.0)
    for d in range(0, dim, 4):
        for g in range(num_group):
            head = kv * num_group + g
            q0, q1 = qkv[row, head, d], qkv[row, head, d + 1]
            q2, q3 = qkv[row, head, d + 2], qkv[row, head, d + 3]
            for j in range(length):
                scores[g, j] += (
                    q0 * keys[layer, slot, kv, d, j]
                    + q1 * keys[layer, slot, kv, d + 1, j]
                    + q2 * keys[layer, slot, kv, d + 2, j]
                    + q3 * keys[layer, slot, kv, d + 3, j]
                )


@_kernel(fastmath=True)  # a maximum is vectorised only where NaN may be ignored
def _largest(scores: Floats, g: int, length: int) -> Any:
    largest = scores[g, 0]
    for j in range(length):
        largest = max(largest, scores[g, j])
    return largest


@_kernel()
def _exp_row(scores: Floats, g: int, length: int, scratch: NDArray[np.int32]) -> Any:
    """scores[g] = exp(scores[g] - max); returns their sum."""
    largest = _largest(scores, g, length)
    for j in range(length):
        whole, mantissa = _exp_parts(scores[g, j] - largest)
        scratch[j] = _bits(whole)
        scores[g, j] = mantissa
    powers = scratch.view(np.float32)
    total = float32(0.0)
    for j in range(length):
        scores[g, j] *= powers[j]
        total += scores[g, j]
    return total


@_kernel()
def _mix(
    weights: Floats, values: Floats, layer: int, slot: int, kv: int, length: int, out: Floats, row: int
) -> None:
    """out[row, g] += sum of weights[g, j] * v_j."""
    num_group, dim = weights.shape[0], values.shape[4]
    whole = length // 4 * 4
    for j in range(0, whole, 4):
        for g in range(num_group):
            head = kv * num_group + g
            w0, w1, w2, w3 = weights[g, j], weights[g, j + 1], weights[g, j + 2], weights[g, j + 3]
            for d in range(dim):
                out[row, head, d] += (
                    w0 * values[layer, slot, kv, j, d]
                    + w1 * values[layer, slot, kv, j + 1, d]
                    + w2 * values[layer, slot, kv, j + 2, d]
                    + w3 * values[layer, slot, kv, j + 3, d]
                )
    for j in range(whole, length):
        for g in range(num_group):
            head = kv * num_group + g
            for d in range(dim):
                out[row, head, d] += weights[g, j] * values[layer, slot, kv, j, d]


@_kernel(
    "(int64, int64, int64, float32[:, :, ::1], float32[:, ::1], float32, float32[:, :, ::1], int64[::1],"
    " float32[:, :, :, :, ::1], float32[:, :, :, :, ::1], float32[:, ::1], int32[::1], float32[:, :, ::1])"
)
def attend(
    layer: int,
    first: int,
    num_slots: int,
    qkv: Floats,
    gains: Floats,
    epsilon: float,
    rotations: Floats,
    positions: Ints,
    keys: Floats,
    values: Floats,
    scores: Floats,
    scratch: NDArray[np.int32],
    out: Floats,
) -> None:
    """Attention of one layer for the responses of one tier; keeps their new keys and values.

    Args:
        first: the row of the tier's slot 0; its slots are the next rows.
        qkv: [T, H + 2 K, D], as projected; changed in place.
        gains: [H + K, D] of the norms of q and k, or empty.
        rotations: [max_tokens, D / 2, 2], as in model.py.
        positions: [T], where each row writes.
        keys: [L, S, K, D, C].
        values: [L, S, K, C, D].
        scores: [G, max_tokens], and scratch: [max_tokens], to work in.
        out: [T, H, D].
    """
    num_group, num_kv, dim = scores.shape[0], keys.shape[2], keys.shape[3]
    for slot in range(num_slots):
        row = first + slot
        length = positions[row] + 1
        _place(qkv, row, gains, epsilon, rotations, positions[row], keys, values, layer, slot)
        for kv in range(num_kv):
            _score(qkv, row, keys, layer, slot, kv, length, scores)
            for g in range(num_group):
                share = float32(1.0) / _exp_row(scores, g, length, scratch)
                for j in range(length):
                    scores[g, j] *= share
                for d in range(dim):
                    out[row, kv * num_group + g, d] = float32(0.0)
            _mix(scores, values, layer, slot, kv, length, out, row)


@_kernel("(float32[:, ::1], float64[::1], int32[::1], int64[::1], float64[::1])")
def draw(
    logits: Floats,
    uniforms: NDArray[np.float64],
    scratch: NDArray[np.int32],
    ids: Ints,
    logprobs: NDArray[np.float64],
) -> None:
    """As sampler.draw without truncation; logits [T, V] become weights, scratch: [V].

    Of logits that are not numbers it draws the last token, with a log-prob that is not a number.
    """
    num_rows, num_tokens = logits.shape
    for row in range(num_rows):
        _exp_row(logits, row, num_tokens, scratch)
        total = 0.0
        for token in range(num_tokens):
            total += np.float64(logits[row, token])
        target, below, drawn = uniforms[row] * total, 0.0, num_tokens - 1
        for token in range(num_tokens):
            below += np.float64(logits[row, token])
            if below > target:
                drawn = token
                break
        ids[row] = drawn
        logprobs[row] = log(np.float64(logits[row, drawn]) / total)
