"""What a decode step computes besides matrix products, compiled for the CPU: float32, any lengths.

The matrix products are those of libraries (products.py), which beat what was tried here. The rest is bound by
reading the cache, so each kernel reads it once, for four of the heads that share it (attending.py), and pads
nothing.

Loops go along the last axis by vectors (vectors.py), whose sums stay in registers.

Suffixes as in model.py and cache.py. `at` names offsets into arrays.
"""

from math import log
from typing import Any

import numpy as np
from numba import float32
from numpy.typing import NDArray

from tailrace.attending import mix, mix_one, score, score_one, softmax
from tailrace.compiling import kernel
from tailrace.vectors import (
    WIDE,
    WIDTH,
    exp,
    first,
    load,
    load_first_wide,
    load_one,
    prefetch,
    same,
    same_wide,
    sigmoid,
    store,
    store_first,
    swap_pairs,
    total,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


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
    for at in range(0, gate.size, WIDE):
        left = gate.size - at
        x = load_first_wide(gate, at, left)
        store_first(gate, at, x * sigmoid(x) * load_first_wide(up, at, left), left)


@kernel()
def _turn(
    qkv: Floats, at: int, gains: Floats, head: int, epsilon: float, turns: Floats, position: int
) -> None:
    """Normalise and rotate a head of q or k in place."""
    dim = qkv.shape[2]
    scale = float32(1.0)
    if len(gains):
        squares = same(float32(0.0))
        for d in range(0, dim, WIDTH):
            squares += load(qkv, at + d) * load(qkv, at + d)
        scale /= np.sqrt(total(squares) + epsilon)
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
        store_first(keys, slot_at + index * capacity + position, same(load_one(qkv, k_at + index)), 1)
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
def _offsets(rows: int, heads: Any, dim: int) -> Any:
    """Of four heads, after so many rows of D."""
    a, b, c, e = heads
    return (rows + a) * dim, (rows + b) * dim, (rows + c) * dim, (rows + e) * dim


@kernel(
    "(int64, int64, int64[::1], float32[:, :, ::1], float32[:, ::1], float32, float32[:, :, ::1], int64[::1],"
    " float32[:, :, :, :, ::1], float32[:, :, :, :, ::1], float32[:, ::1], float32[:, :, ::1])"
)
def attend(
    layer: int,
    first_row: int,
    slots: Ints,
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
    """Attention of one layer for the rows of one tier, one after another; keeps their new keys and values.

    Args:
        slots: of the rows from `first_row` on. A row sees what those before it kept: so consecutive rows of a
            slot are a context.
        qkv: [T, H + 2 K, D], as projected; changed in place; D a multiple of WIDTH.
        gains: [H + K, D] of the norms of q and k, or empty.
        turns: [max_tokens, 2, D]: position p turns each number of a head by the cosine, the other of its
            pair by the sine.
        positions: [T], where each row writes.
        keys: [L, S, K, D, C].
        values: [L, S, K, C, D].
        scores: [4, at least max_tokens + WIDE] to work in.
        out: [T, H, D].
    """
    num_heads, num_kv, dim, capacity = out.shape[1], keys.shape[2], keys.shape[3], keys.shape[4]
    num_group, one = num_heads // num_kv, float32(1.0)
    slot_size = num_kv * dim * capacity
    for number in range(len(slots)):
        row = first_row + number
        length = positions[row] + 1
        slot_at = (layer * keys.shape[1] + slots[number]) * slot_size
        for head in range(num_heads + num_kv):
            q_at = (row * qkv.shape[1] + head) * dim
            _turn(qkv, q_at, gains, head, epsilon, turns, positions[row])
        _keep(qkv, row, keys, values, slot_at, positions[row])
        if number + 1 < len(slots):
            next_slot_at = (layer * keys.shape[1] + slots[number + 1]) * slot_size
            _fetch_column(keys, next_slot_at + positions[row + 1])
        for kv in range(num_kv):
            at = slot_at + kv * dim * capacity
            next_at = at + dim * capacity
            if num_group == 1:
                q_at, out_at = (row * qkv.shape[1] + kv) * dim, (row * num_heads + kv) * dim
                score_one(qkv, q_at, dim, keys, at, WIDE, capacity, length, capacity, scores, values, at)
                _, weight = softmax(scores, 0, length, length, one)
                share = one / weight
                mix_one(scores, 0, values, at, dim, length, share, out, out_at, keys, next_at, WIDE, capacity)
                continue
            for head in range(kv * num_group, (kv + 1) * num_group, 4):
                last = (kv + 1) * num_group - 1
                heads = (head, min(head + 1, last), min(head + 2, last), min(head + 3, last))
                four_at = _offsets(row * qkv.shape[1], heads, dim)
                four_to = _offsets(row * num_heads, heads, dim)
                score(qkv, four_at, dim, keys, at, WIDE, capacity, length, capacity, scores, values, at)
                _, a = softmax(scores, 0, length, length, one)
                _, b = softmax(scores, 1, length, length, one)
                _, c = softmax(scores, 2, length, length, one)
                _, e = softmax(scores, 3, length, length, one)
                shares = (one / a, one / b, one / c, one / e)
                mix(scores, values, at, dim, length, shares, out, four_to, keys, next_at, WIDE, capacity)


@kernel()
def _exp_row(x: Floats, at: int, length: int, top: float) -> Any:
    """x = exp(x - top) from `at` on; returns their sum."""
    sums = same_wide(float32(0.0))
    for j in range(0, length, WIDE):
        weights = first(exp(load_first_wide(x, at + j, length - j) - top), length - j, float32(0.0))
        store_first(x, at + j, weights, length - j)
        sums += weights
    return total(sums)


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
