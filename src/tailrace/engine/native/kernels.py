"""What a decode step computes besides matrix products, compiled for the CPU: float32, any lengths.

The matrix products stay with torch (MKL), which beat those that were tried here. The rest is bound by reading
the cache, so each kernel reads it once, for all the heads that share it, and pads nothing.

Loops go along the last axis by vectors (vectors.py), whose sums stay in registers; what is read next is
asked for ahead of time, because waiting for memory is most of what attention costs.

Suffixes as in model.py and cache.py; G query heads share a key-value head. `at` names offsets into arrays.
"""

from math import log
from typing import Any

import numpy as np
from numba import float32
from numpy.typing import NDArray

from tailrace.compiling import kernel
from tailrace.vectors import (
    WIDTH,
    exp,
    first,
    greater,
    largest,
    load,
    load_first,
    load_same,
    prefetch,
    same,
    store,
    store_first,
    swap_pairs,
    total,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
_LINE = 16
"""Floats in a line of the processor's cache."""
_BLOCK = 128
"""Positions whose keys or values stay near, while all heads of a group use them."""
_LOWEST = -1e30
"""Less than any score."""


@kernel("(float32[:, ::1], float32, float32[:, ::1])")
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


@kernel("(float32[:, ::1], float32[:, ::1])")
def silu_times(gate: Floats, up: Floats) -> None:
    """gate = silu(gate) * up, in place, [T, intermediate]."""
    for at in range(0, gate.size, WIDTH):
        count = min(WIDTH, gate.size - at)
        x = load_first(gate, at, count)
        silu = x / (same(float32(1.0)) + exp(same(float32(0.0)) - x))
        store_first(gate, at, silu * load_first(up, at, count), count)


@kernel()
def _turn(
    qkv: Floats, at: int, gains: Floats, head: int, epsilon: float, turns: Floats, position: int
) -> None:
    """Normalise and rotate a head of q or k in place."""
    dim = qkv.shape[2]
    scale = same(float32(1.0))
    if len(gains):
        squares = same(float32(0.0))
        for d in range(0, dim, WIDTH):
            squares += load(qkv, at + d) * load(qkv, at + d)
        scale = same(float32(1.0) / np.sqrt(total(squares) + epsilon))
    turns_at = position * 2 * dim
    for d in range(0, dim, WIDTH):
        x = load(qkv, at + d) * scale
        if len(gains):
            x *= load(gains, head * dim + d)
        turned = x * load(turns, turns_at + d) + swap_pairs(x) * load(turns, turns_at + dim + d)
        store(qkv, at + d, turned)


@kernel()
def _keep(qkv: Floats, row: int, keys: Floats, values: Floats, slot_at: int, position: int) -> None:
    """Write the k and v of a row into the cache."""
    num_kv, dim, capacity = keys.shape[2], keys.shape[3], keys.shape[4]
    num_heads = qkv.shape[1] - 2 * num_kv
    k_at = (row * qkv.shape[1] + num_heads) * dim
    v_at = k_at + num_kv * dim
    for index in range(num_kv * dim):
        store_first(keys, slot_at + index * capacity + position, load_same(qkv, k_at + index), 1)
    for kv in range(num_kv):
        for d in range(0, dim, WIDTH):
            v = load(qkv, v_at + kv * dim + d)
            store(values, slot_at + (kv * capacity + position) * dim + d, v)


@kernel()
def _fetch_column(keys: Floats, at: int) -> None:
    """Ask for the memory of one position of a slot, all heads."""
    for index in range(keys.shape[2] * keys.shape[3]):
        prefetch(keys, at + index * keys.shape[4])


@kernel()
def _exp_row(x: Floats, at: int, length: int, top: float) -> Any:
    """x = exp(x - top) from `at` on; returns their sum."""
    sums, tops = same(float32(0.0)), same(top)
    for j in range(0, length, WIDTH):
        weights = first(exp(load_first(x, at + j, length - j) - tops), length - j, float32(0.0))
        store_first(x, at + j, weights, length - j)
        sums += weights
    return total(sums)


@kernel()
def _score(
    qkv: Floats,
    q_at: int,
    keys: Floats,
    values: Floats,
    head_at: int,
    start: int,
    stop: int,
    scores: Floats,
    at: int,
) -> None:
    """q . k_j for the positions j from `start` to `stop` of a head. Up to three vectors beyond are written,
    too. Asks for the values of the positions on its way.
    """
    dim, capacity = keys.shape[3], keys.shape[4]
    zero = same(float32(0.0))
    j = start
    # Four vectors side by side, while there is more than half to compute and a row of keys has them.
    while stop - j > 2 * WIDTH and capacity - j >= 4 * WIDTH:
        a, b, c, e = zero, zero, zero, zero
        k_at, v_at = head_at + j, head_at + j * dim
        for d in range(dim):
            prefetch(values, v_at)
            prefetch(values, v_at + _LINE)
            q = load_same(qkv, q_at + d)
            a += q * load(keys, k_at)
            b += q * load(keys, k_at + WIDTH)
            c += q * load(keys, k_at + 2 * WIDTH)
            e += q * load(keys, k_at + 3 * WIDTH)
            k_at += capacity
            v_at += 2 * _LINE
        store(scores, at + j, a)
        store(scores, at + j + WIDTH, b)
        store(scores, at + j + 2 * WIDTH, c)
        store(scores, at + j + 3 * WIDTH, e)
        j += 4 * WIDTH
    while j < stop:
        a, b = zero, zero
        k_at = head_at + j
        for d in range(0, dim, 2):
            a += load_same(qkv, q_at + d) * load_first(keys, k_at, stop - j)
            b += load_same(qkv, q_at + d + 1) * load_first(keys, k_at + capacity, stop - j)
            k_at += 2 * capacity
        store(scores, at + j, a + b)
        j += WIDTH


@kernel()
def _softmax(x: Floats, at: int, length: int) -> Any:
    """x = exp(x - largest) from `at` on; returns one over their sum."""
    tops = same(float32(_LOWEST))
    for j in range(0, length, WIDTH):
        tops = greater(tops, first(load_first(x, at + j, length - j), length - j, float32(_LOWEST)))
    return float32(1.0) / _exp_row(x, at, length, largest(tops))


@kernel()
def _mix(
    weights: Floats,
    at: int,
    values: Floats,
    head_at: int,
    start: int,
    stop: int,
    share: float,
    out: Floats,
    out_at: int,
    keys: Floats,
    next_at: int,
) -> None:
    """out += share * sum of weights[j] * v_j, over the positions j from `start` to `stop` of a head. Asks for
    keys of the next on its way."""
    dim, capacity = values.shape[4], values.shape[3]
    zero, shares = same(float32(0.0)), same(share)
    whole = start + (stop - start) // 4 * 4
    for d in range(0, dim, WIDTH):
        a, b, c, e = zero, zero, zero, zero
        v_at = head_at + start * dim + d
        for j in range(start, whole, 4):
            prefetch(keys, next_at + (d + j % _LINE // 2) * capacity + j // _LINE * _LINE)
            a += load_same(weights, at + j) * load(values, v_at)
            b += load_same(weights, at + j + 1) * load(values, v_at + dim)
            c += load_same(weights, at + j + 2) * load(values, v_at + 2 * dim)
            e += load_same(weights, at + j + 3) * load(values, v_at + 3 * dim)
            v_at += 4 * dim
        for j in range(whole, stop):
            a += load_same(weights, at + j) * load(values, v_at)
            v_at += dim
        store(out, out_at + d, load(out, out_at + d) + ((a + b) + (c + e)) * shares)


@kernel(
    "(int64, int64, int64, float32[:, :, ::1], float32[:, ::1], float32, float32[:, :, ::1], int64[::1],"
    " float32[:, :, :, :, ::1], float32[:, :, :, :, ::1], float32[:, ::1], float32[:, :, ::1])"
)
def attend(
    layer: int,
    first_row: int,
    num_slots: int,
    qkv: Floats,
    gains: Floats,
    epsilon: float,
    turns: Floats,
    positions: Ints,
    keys: Floats,
    values: Floats,
    scores: Floats,
    out: Floats,
) -> None:
    """Attention of one layer for the responses of one tier; keeps their new keys and values.

    Args:
        first_row: the row of the tier's slot 0; its slots are the next rows.
        qkv: [T, H + 2 K, D], as projected; changed in place; D a multiple of WIDTH.
        gains: [H + K, D] of the norms of q and k, or empty.
        turns: [max_tokens, 2, D]: position p turns each number of a head by the cosine, the other of its
            pair by the sine.
        positions: [T], where each row writes.
        keys: [L, S, K, D, C].
        values: [L, S, K, C, D].
        scores: [G, max_tokens + 4 * WIDTH] to work in.
        out: [T, H, D].
    """
    num_heads, num_kv, dim, capacity = out.shape[1], keys.shape[2], keys.shape[3], keys.shape[4]
    num_group = num_heads // num_kv
    shares = np.empty(num_group, np.float32)
    row_size = scores.shape[1]
    for slot in range(num_slots):
        row = first_row + slot
        length = positions[row] + 1
        slot_at = (layer * keys.shape[1] + slot) * num_kv * dim * capacity
        for head in range(num_heads + num_kv):
            q_at = (row * qkv.shape[1] + head) * dim
            _turn(qkv, q_at, gains, head, epsilon, turns, positions[row])
        _keep(qkv, row, keys, values, slot_at, positions[row])
        out[row] = float32(0.0)
        if slot + 1 < num_slots:
            _fetch_column(keys, slot_at + num_kv * dim * capacity + positions[row + 1])
        for kv in range(num_kv):
            head_at = slot_at + kv * dim * capacity
            next_at = head_at + dim * capacity
            q_at = (row * qkv.shape[1] + kv * num_group) * dim
            out_at = (row * num_heads + kv * num_group) * dim
            for start in range(0, length, _BLOCK):
                stop = min(length, start + _BLOCK)
                for g in range(num_group):
                    _score(qkv, q_at + g * dim, keys, values, head_at, start, stop, scores, g * row_size)
            for g in range(num_group):
                shares[g] = _softmax(scores, g * row_size, length)
            for start in range(0, length, _BLOCK):
                stop = min(length, start + _BLOCK)
                for g in range(num_group):
                    at, to = g * row_size, out_at + g * dim
                    _mix(scores, at, values, head_at, start, stop, shares[g], out, to, keys, next_at)


@kernel("(float32[:, ::1], float64[::1], int64[::1], float64[::1])")
def draw(logits: Floats, uniforms: NDArray[np.float64], ids: Ints, logprobs: NDArray[np.float64]) -> None:
    """As sampler.draw without truncation; logits [T, V] become weights.

    Of logits that are not numbers it draws the last token, with a log-prob that is not a number.
    """
    num_rows, num_tokens = logits.shape
    for row in range(num_rows):
        _exp_row(logits, row * num_tokens, num_tokens, logits[row].max())
        all_weights = 0.0
        for token in range(num_tokens):
            all_weights += np.float64(logits[row, token])
        target, below, drawn = uniforms[row] * all_weights, 0.0, num_tokens - 1
        for token in range(num_tokens):
            below += np.float64(logits[row, token])
            if below > target:
                drawn = token
                break
        ids[row] = drawn
        logprobs[row] = log(np.float64(logits[row, drawn]) / all_weights)
