"""Four queries against the keys and values of one head: what attention is made of on a CPU.

The engine's four are heads that share their keys; the trainer's are tokens, too. What is read of keys and
values serves all four, out of registers. The softmax is taken of a whole row. One query alone has functions
of its own.

Where a query is missing another stands for it, and is written first: rows may repeat. `at` names offsets into
arrays. D is the head dimension, a multiple of WIDTH. Each function asks ahead of time for the memory that is
read next (`soon`), because waiting for it is half of what attention costs.

After a change here, touch the files that use it, as vectors.py says.
"""

from typing import Any

import numpy as np
from numba import float32
from numpy.typing import NDArray

from tailrace.compiling import kernel
from tailrace.vectors import (
    WIDE,
    WIDTH,
    exp,
    first,
    greater,
    largest,
    load,
    load_first_wide,
    load_like,
    load_one,
    load_wide,
    num_lanes,
    prefetch,
    same,
    same_wide,
    store,
    total,
)

Floats = NDArray[np.float32]

_LINE = 16
"""Floats in a line of the processor's cache."""
_LOWEST = -1e30
"""Less than any score."""


@kernel()
def score(
    q: Floats,
    q_at: Any,
    dim: int,
    keys: Floats,
    at: int,
    apart: int,
    stride: int,
    length: int,
    room: int,
    scores: Floats,
    soon: Floats,
    soon_at: int,
) -> None:
    """scores[r, j] = q_r . k_j for the positions j below `length`. More are written, up to `room` or to a
    whole vector.

    Args:
        q_at: the four queries, D floats each.
        keys: read by wide vectors of positions. Vector i of dimension d is at `at` + i `apart` + d `stride`.
        room: positions that may be read.
        scores: [4, C]
        soon, soon_at: the values, asked for.
    """
    capacity = scores.shape[1]
    zero = same_wide(float32(0.0))
    q0, q1, q2, q3 = q_at
    j = 0
    while j < length:
        a0, b0, c0, e0, a1, b1, c1, e1 = zero, zero, zero, zero, zero, zero, zero, zero
        k_at = at + j // WIDE * apart
        if length - j > WIDE and room - j >= 2 * WIDE:
            ahead = soon_at + j * dim
            for d in range(dim):
                for line in range(ahead, ahead + 2 * WIDE, _LINE):
                    prefetch(soon, line)
                ahead += 2 * WIDE
                k0, k1 = load_wide(keys, k_at), load_wide(keys, k_at + apart)
                a, b = load_one(q, q0 + d), load_one(q, q1 + d)
                c, e = load_one(q, q2 + d), load_one(q, q3 + d)
                a0 += k0 * a
                a1 += k1 * a
                b0 += k0 * b
                b1 += k1 * b
                c0 += k0 * c
                c1 += k1 * c
                e0 += k0 * e
                e1 += k1 * e
                k_at += stride
            store(scores, j + WIDE, a1)
            store(scores, capacity + j + WIDE, b1)
            store(scores, 2 * capacity + j + WIDE, c1)
            store(scores, 3 * capacity + j + WIDE, e1)
            step = 2 * WIDE
        else:
            for d in range(dim):
                k0 = load_first_wide(keys, k_at, room - j)
                a0 += k0 * load_one(q, q0 + d)
                b0 += k0 * load_one(q, q1 + d)
                c0 += k0 * load_one(q, q2 + d)
                e0 += k0 * load_one(q, q3 + d)
                k_at += stride
            step = WIDE
        store(scores, j, a0)
        store(scores, capacity + j, b0)
        store(scores, 2 * capacity + j, c0)
        store(scores, 3 * capacity + j, e0)
        j += step


@kernel()
def softmax(scores: Floats, r: int, length: int, stop: int, scale: float) -> Any:
    """x = exp(scale * (x - largest)) of row r below `length`, zero from there to `stop`.

    Returns the largest x, times the scale, and the sum of what was written."""
    at = r * scores.shape[1]
    tops = same_wide(float32(_LOWEST))
    for j in range(0, length, WIDE):
        tops = greater(tops, first(load_wide(scores, at + j), length - j, float32(_LOWEST)))
    top = largest(tops)
    sums = same_wide(float32(0.0))
    for j in range(0, length, WIDE):
        weights = exp((load_wide(scores, at + j) - top) * float32(scale))
        weights = first(weights, length - j, float32(0.0))
        store(scores, at + j, weights)
        sums += weights
    for j in range((length + WIDE - 1) // WIDE * WIDE, stop):
        scores[r, j] = float32(0.0)
    return top * float32(scale), total(sums)


@kernel()
def mix(
    weights: Floats,
    values: Floats,
    at: int,
    dim: int,
    length: int,
    shares: Any,
    out: Floats,
    out_at: Any,
    soon: Floats,
    soon_at: int,
    apart: int,
    stride: int,
) -> None:
    """out_r = share_r * sum over j below `length` of weights[r, j] * v_j.

    Args:
        weights: [4, C]
        values: v_j is at `at` + j D.
        shares, out_at: four each.
        soon, soon_at, apart, stride: the keys that `score` reads next, asked for.
    """
    if dim == WIDTH:
        for r in range(3, -1, -1):
            w_at, to = r * weights.shape[1], out_at[r]
            mix_one(weights, w_at, values, at, dim, length, shares[r], out, to, soon, soon_at, apart, stride)
        return
    wide, narrow = same_wide(float32(0.0)), same(float32(0.0))
    ahead, d = (soon, soon_at, apart, stride), 0
    while d < dim:
        left = dim - d
        if left >= 2 * WIDE:
            _mix_two(wide, wide, d, weights, values, at, dim, length, shares, out, out_at, ahead)
            d += 2 * WIDE
        elif left >= WIDE + WIDTH:
            _mix_two(wide, narrow, d, weights, values, at, dim, length, shares, out, out_at, ahead)
            d += WIDE + WIDTH
        else:
            d = dim - 2 * WIDTH  # of a single vector that is left: one done is done again
            _mix_two(narrow, narrow, d, weights, values, at, dim, length, shares, out, out_at, ahead)
            d = dim


@kernel()
def _mix_two(
    zero0: Any,
    zero1: Any,
    d: int,
    weights: Floats,
    values: Floats,
    at: int,
    dim: int,
    length: int,
    shares: Any,
    out: Floats,
    out_at: Any,
    ahead: Any,
) -> None:
    """For as many dimensions, from `d` on, as both zeros have lanes."""
    capacity, lanes = weights.shape[1], num_lanes(zero0)
    soon, soon_at, apart, stride = ahead
    a0, b0, c0, e0, a1, b1, c1, e1 = zero0, zero0, zero0, zero0, zero1, zero1, zero1, zero1
    v_at = at + d
    for start in range(0, length, WIDE):
        next_at = soon_at + start // WIDE * apart + d * stride
        for j in range(start, min(start + WIDE, length)):
            prefetch(soon, next_at)
            prefetch(soon, next_at + WIDE * stride)
            v0, v1 = load_like(zero0, values, v_at), load_like(zero1, values, v_at + lanes)
            a, b = load_one(weights, j), load_one(weights, capacity + j)
            c, e = load_one(weights, 2 * capacity + j), load_one(weights, 3 * capacity + j)
            a0 += v0 * a
            a1 += v1 * a
            b0 += v0 * b
            b1 += v1 * b
            c0 += v0 * c
            c1 += v1 * c
            e0 += v0 * e
            e1 += v1 * e
            v_at += dim
            next_at += stride
    # The first row comes last: a row's own product is written after those of rows that it stands for.
    store(out, out_at[3] + d, e0 * shares[3])
    store(out, out_at[3] + d + lanes, e1 * shares[3])
    store(out, out_at[2] + d, c0 * shares[2])
    store(out, out_at[2] + d + lanes, c1 * shares[2])
    store(out, out_at[1] + d, b0 * shares[1])
    store(out, out_at[1] + d + lanes, b1 * shares[1])
    store(out, out_at[0] + d, a0 * shares[0])
    store(out, out_at[0] + d + lanes, a1 * shares[0])


@kernel()
def score_one(
    q: Floats,
    q_at: int,
    dim: int,
    keys: Floats,
    at: int,
    apart: int,
    stride: int,
    length: int,
    room: int,
    scores: Floats,
    soon: Floats,
    soon_at: int,
) -> None:
    """As `score`, of one query, into the first row."""
    zero = same_wide(float32(0.0))
    j = 0
    while j < length:
        a, b, c, e = zero, zero, zero, zero
        k_at, ahead = at + j // WIDE * apart, soon_at + j * dim
        if length - j > 2 * WIDE and room - j >= 4 * WIDE:
            for d in range(dim):
                for line in range(ahead, ahead + 4 * WIDE, _LINE):
                    prefetch(soon, line)
                x = load_one(q, q_at + d)
                a += load_wide(keys, k_at) * x
                b += load_wide(keys, k_at + apart) * x
                c += load_wide(keys, k_at + 2 * apart) * x
                e += load_wide(keys, k_at + 3 * apart) * x
                k_at += stride
                ahead += 4 * WIDE
            store(scores, j + WIDE, b)
            store(scores, j + 2 * WIDE, c)
            store(scores, j + 3 * WIDE, e)
            step = 4 * WIDE
        else:
            for d in range(0, dim, 2):
                prefetch(soon, ahead)
                a += load_first_wide(keys, k_at, room - j) * load_one(q, q_at + d)
                b += load_first_wide(keys, k_at + stride, room - j) * load_one(q, q_at + d + 1)
                k_at += 2 * stride
                ahead += 2 * WIDE
            a += b
            step = WIDE
        store(scores, j, a)
        j += step


@kernel()
def mix_one(
    weights: Floats,
    weights_at: int,
    values: Floats,
    at: int,
    dim: int,
    length: int,
    share: float,
    out: Floats,
    out_at: int,
    soon: Floats,
    soon_at: int,
    apart: int,
    stride: int,
) -> None:
    """As `mix`, of the one row of weights that begins at `weights_at`."""
    zero = same(float32(0.0))
    for d in range(0, dim, WIDTH):
        a, b, c, e = zero, zero, zero, zero
        v_at = at + d
        for start in range(0, length, WIDE):
            ahead = soon_at + start // WIDE * apart + d * stride
            stop = min(start + WIDE, length)
            whole = start + (stop - start) // 4 * 4
            for j in range(start, whole, 4):
                prefetch(soon, ahead)
                prefetch(soon, ahead + stride)
                a += load(values, v_at) * load_one(weights, weights_at + j)
                b += load(values, v_at + dim) * load_one(weights, weights_at + j + 1)
                c += load(values, v_at + 2 * dim) * load_one(weights, weights_at + j + 2)
                e += load(values, v_at + 3 * dim) * load_one(weights, weights_at + j + 3)
                v_at += 4 * dim
                ahead += 2 * stride
            for j in range(whole, stop):
                a += load(values, v_at) * load_one(weights, weights_at + j)
                v_at += dim
        store(out, out_at + d, ((a + b) + (c + e)) * share)
