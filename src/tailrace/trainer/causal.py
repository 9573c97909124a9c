"""Causal attention of packed sequences and its gradient, compiled for the CPU in float32.

Nothing is padded, and nothing of the size of a sequence squared is kept. Four rows, a row being a query head
at a token, go along the keys together, so that heads that share their keys read them once. The softmax is
taken of a whole row, and the backward pass computes it again (FlashAttention, 2205.14135, algorithm 4 without
its blocks: a sequence's keys and values stay in the processor's second cache).

Sequences are independent: a call computes those from `begin` to `end`, so that threads can share them.

T tokens, H query and K key-value heads of D dimensions, D a multiple of WIDTH, G = H / K. The keys that rows
go along lie in tiles [D, STRIDE], so that memory is read in order. `at` names offsets into arrays.
"""

from typing import Any

import numpy as np
from numba import float32

from tailrace.compiling import kernel
from tailrace.trainer.kernels import Floats, Ints
from tailrace.vectors import WIDTH, exp, first, greater, largest, load, load_same, same, store, total

STRIDE = 2 * WIDTH
"""Keys that are scored together."""
_LOWEST = -1e30
"""Less than any score."""


@kernel()
def _to_tiles(x: Floats, token: int, head: int, length: int, tiles: Floats) -> None:
    """x[token + j, head] for j below `length`, and zero behind in the last tile."""
    for tile in range((length + STRIDE - 1) // STRIDE):
        for lane in range(STRIDE):
            j = tile * STRIDE + lane
            for d in range(x.shape[2]):
                tiles[tile, d, lane] = x[token + j, head, d] if j < length else float32(0.0)


@kernel()
def _from_tiles(tiles: Floats, token: int, head: int, length: int, x: Floats) -> None:
    """x[token + j, head] for j below `length`."""
    for j in range(length):
        for d in range(x.shape[2]):
            x[token + j, head, d] = tiles[j // STRIDE, d, j % STRIDE]


@kernel()
def _copy(x: Floats, token: int, head: int, length: int, out: Floats) -> None:
    """out[j] = x[token + j, head]"""
    for j in range(length):
        for d in range(x.shape[2]):
            out[j, d] = x[token + j, head, d]


@kernel()
def _num_tiles(boundaries: Ints, begin: int, end: int) -> int:
    """Of the longest sequence."""
    longest = 0
    for n in range(begin, end):
        longest = max(longest, boundaries[n + 1] - boundaries[n])
    return (longest + STRIDE - 1) // STRIDE


@kernel()
def _rows(row: int, num_rows: int, group: int, heads_at: int, num_heads: int, token: int, dim: int) -> Any:
    """Where four rows begin in an array [T, num_heads, D]; the last row stands for the missing ones."""
    last = num_rows - 1
    b, c, e = min(row + 1, last), min(row + 2, last), min(row + 3, last)
    return (
        ((token + row // group) * num_heads + heads_at + row % group) * dim,
        ((token + b // group) * num_heads + heads_at + b % group) * dim,
        ((token + c // group) * num_heads + heads_at + c % group) * dim,
        ((token + e // group) * num_heads + heads_at + e % group) * dim,
    )


@kernel()
def _score(q: Floats, at: Any, keys: Floats, length: int, scores: Floats) -> None:
    """scores[r, j] = q_r . k_j for the four rows at `at` and j below `length`, rounded up."""
    dim, capacity = keys.shape[1], scores.shape[1]
    zero = same(float32(0.0))
    for j in range(0, length, STRIDE):
        a0, b0, c0, e0, a1, b1, c1, e1 = zero, zero, zero, zero, zero, zero, zero, zero
        k_at = j * dim
        for d in range(dim):
            k0, k1 = load(keys, k_at), load(keys, k_at + WIDTH)
            a, b = load_same(q, at[0] + d), load_same(q, at[1] + d)
            c, e = load_same(q, at[2] + d), load_same(q, at[3] + d)
            a0 += a * k0
            a1 += a * k1
            b0 += b * k0
            b1 += b * k1
            c0 += c * k0
            c1 += c * k1
            e0 += e * k0
            e1 += e * k1
            k_at += STRIDE
        store(scores, j, a0)
        store(scores, j + WIDTH, a1)
        store(scores, capacity + j, b0)
        store(scores, capacity + j + WIDTH, b1)
        store(scores, 2 * capacity + j, c0)
        store(scores, 2 * capacity + j + WIDTH, c1)
        store(scores, 3 * capacity + j, e0)
        store(scores, 3 * capacity + j + WIDTH, e1)


@kernel()
def _softmax(scores: Floats, r: int, length: int, stop: int, scale: float) -> Any:
    """x = exp(scale * (x - largest)) of row r below `length`, zero from there to `stop`.

    Returns their sum, and the logarithm of the sum of exp(scale * x)."""
    at = r * scores.shape[1]
    tops = same(float32(_LOWEST))
    for j in range(0, length, WIDTH):
        tops = greater(tops, first(load(scores, at + j), length - j, float32(_LOWEST)))
    top = largest(tops)
    sums, shift, scales = same(float32(0.0)), same(top), same(float32(scale))
    for j in range(0, length, WIDTH):
        weights = exp((load(scores, at + j) - shift) * scales)
        weights = first(weights, length - j, float32(0.0))
        store(scores, at + j, weights)
        sums += weights
    for j in range((length + WIDTH - 1) // WIDTH * WIDTH, stop):
        scores[r, j] = float32(0.0)
    weight = total(sums)
    return weight, top * scale + np.log(weight)


@kernel()
def _mix(weights: Floats, values: Floats, length: int, out: Floats, at: Any, shares: Any) -> None:
    """out_r = share_r * sum over j below `length` of weights[r, j] * v_j, for four rows."""
    dim, capacity = values.shape[1], weights.shape[1]
    zero = same(float32(0.0))
    even = length // 2 * 2
    for d in range(0, dim, WIDTH):
        a0, b0, c0, e0, a1, b1, c1, e1 = zero, zero, zero, zero, zero, zero, zero, zero
        v_at = d
        for j in range(0, even, 2):
            v0, v1 = load(values, v_at), load(values, v_at + dim)
            a0 += load_same(weights, j) * v0
            a1 += load_same(weights, j + 1) * v1
            b0 += load_same(weights, capacity + j) * v0
            b1 += load_same(weights, capacity + j + 1) * v1
            c0 += load_same(weights, 2 * capacity + j) * v0
            c1 += load_same(weights, 2 * capacity + j + 1) * v1
            e0 += load_same(weights, 3 * capacity + j) * v0
            e1 += load_same(weights, 3 * capacity + j + 1) * v1
            v_at += 2 * dim
        if even < length:
            v0 = load(values, v_at)
            a0 += load_same(weights, even) * v0
            b0 += load_same(weights, capacity + even) * v0
            c0 += load_same(weights, 2 * capacity + even) * v0
            e0 += load_same(weights, 3 * capacity + even) * v0
        # The first row comes last: a row's own product is written after those of rows that it stands for.
        store(out, at[3] + d, (e0 + e1) * same(shares[3]))
        store(out, at[2] + d, (c0 + c1) * same(shares[2]))
        store(out, at[1] + d, (b0 + b1) * same(shares[1]))
        store(out, at[0] + d, (a0 + a1) * same(shares[0]))


@kernel(
    "(float32[:, :, ::1], float32[:, :, ::1], int64[::1], int64, int64, float32, float32[:, :, ::1],"
    " float32[:, ::1])"
)
def attend(
    turned: Floats,
    qkv: Floats,
    boundaries: Ints,
    begin: int,
    end: int,
    scale: float,
    out: Floats,
    logsums: Floats,
) -> None:
    """Of the sequences from `begin` to `end`: softmax(scale q k^T) v.

    Args:
        turned: [T, H + K, D], q and k.
        qkv: [T, H + 2 K, D], of which v is read.
        boundaries: [N + 1]: sequence n is at boundaries[n] : boundaries[n + 1].
        out: [T, H, D], written.
        logsums: [T, H], written: of exp(scale q k^T), over the keys.
    """
    num_heads, dim = out.shape[1], out.shape[2]
    num_kv = turned.shape[1] - num_heads
    group = num_heads // num_kv
    num_tiles = _num_tiles(boundaries, begin, end)
    keys, values = (
        np.empty((num_tiles, dim, STRIDE), np.float32),
        np.empty((num_tiles * STRIDE, dim), np.float32),
    )
    scores = np.empty((4, num_tiles * STRIDE), np.float32)
    logs, one = logsums.ravel(), float32(1.0)
    for n in range(begin, end):
        token, length = boundaries[n], boundaries[n + 1] - boundaries[n]
        num_rows = length * group
        for kv in range(num_kv):
            _to_tiles(turned, token, num_heads + kv, length, keys)
            _copy(qkv, token, num_heads + num_kv + kv, length, values)
            for row in range(0, num_rows, 4):
                seen = min(row + 3, num_rows - 1) // group + 1
                q_at = _rows(row, num_rows, group, kv * group, num_heads + num_kv, token, dim)
                out_at = _rows(row, num_rows, group, kv * group, num_heads, token, dim)
                _score(turned, q_at, keys, seen, scores)
                a, log_a = _softmax(scores, 0, row // group + 1, seen, scale)
                b, log_b = _softmax(scores, 1, min(row + 1, num_rows - 1) // group + 1, seen, scale)
                c, log_c = _softmax(scores, 2, min(row + 2, num_rows - 1) // group + 1, seen, scale)
                e, log_e = _softmax(scores, 3, seen, seen, scale)
                _mix(scores, values, seen, out, out_at, (one / a, one / b, one / c, one / e))
                logs[out_at[0] // dim] = log_a
                logs[out_at[1] // dim] = log_b
                logs[out_at[2] // dim] = log_c
                logs[out_at[3] // dim] = log_e


@kernel()
def _weigh(
    q: Floats,
    q_at: Any,
    grad: Floats,
    grad_at: Any,
    keys: Floats,
    values: Floats,
    seen: Any,
    logs: Any,
    deltas: Any,
    scale: float,
    of_scores: Floats,
    of_keys: Floats,
    of_values: Floats,
) -> None:
    """For four rows, with p = softmax(scale q k^T) computed again:

        of_scores[r, j] = scale * p_rj * (grad_r . v_j - delta_r)
        of_keys_j += sum over r of of_scores[r, j] * q_r
        of_values_j += sum over r of p_rj * grad_r

    A row sees `seen[r]` keys; a row that stands for another sees none.
    """
    dim, capacity = keys.shape[1], of_scores.shape[1]
    zero, scales = same(float32(0.0)), same(float32(scale))
    for j in range(0, seen[4], WIDTH):
        a, b, c, e, da, db, dc, de = zero, zero, zero, zero, zero, zero, zero, zero
        tile_at = j // STRIDE * STRIDE * dim + j % STRIDE
        at = tile_at
        for d in range(dim):
            k, v = load(keys, at), load(values, at)
            a += load_same(q, q_at[0] + d) * k
            b += load_same(q, q_at[1] + d) * k
            c += load_same(q, q_at[2] + d) * k
            e += load_same(q, q_at[3] + d) * k
            da += load_same(grad, grad_at[0] + d) * v
            db += load_same(grad, grad_at[1] + d) * v
            dc += load_same(grad, grad_at[2] + d) * v
            de += load_same(grad, grad_at[3] + d) * v
            at += STRIDE
        a = first(exp(a * scales - same(logs[0])), seen[0] - j, float32(0.0))
        b = first(exp(b * scales - same(logs[1])), seen[1] - j, float32(0.0))
        c = first(exp(c * scales - same(logs[2])), seen[2] - j, float32(0.0))
        e = first(exp(e * scales - same(logs[3])), seen[3] - j, float32(0.0))
        da = a * (da - same(deltas[0])) * scales
        db = b * (db - same(deltas[1])) * scales
        dc = c * (dc - same(deltas[2])) * scales
        de = e * (de - same(deltas[3])) * scales
        store(of_scores, j, da)
        store(of_scores, capacity + j, db)
        store(of_scores, 2 * capacity + j, dc)
        store(of_scores, 3 * capacity + j, de)
        at = tile_at
        for d in range(dim):
            k = load(of_keys, at)
            k += da * load_same(q, q_at[0] + d)
            k += db * load_same(q, q_at[1] + d)
            k += dc * load_same(q, q_at[2] + d)
            k += de * load_same(q, q_at[3] + d)
            store(of_keys, at, k)
            v = load(of_values, at)
            v += a * load_same(grad, grad_at[0] + d)
            v += b * load_same(grad, grad_at[1] + d)
            v += c * load_same(grad, grad_at[2] + d)
            v += e * load_same(grad, grad_at[3] + d)
            store(of_values, at, v)
            at += STRIDE


@kernel()
def _product(x: Floats, y: Floats, at: int, dim: int) -> Any:
    sums = same(float32(0.0))
    for d in range(0, dim, WIDTH):
        sums += load(x, at + d) * load(y, at + d)
    return total(sums)


@kernel(
    "(float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, ::1],"
    " int64[::1], int64, int64, float32, float32[:, :, ::1], float32[:, :, ::1])"
)
def attend_backward(
    grad: Floats,
    turned: Floats,
    qkv: Floats,
    out: Floats,
    logsums: Floats,
    boundaries: Ints,
    begin: int,
    end: int,
    scale: float,
    of_turned: Floats,
    of_qkv: Floats,
) -> None:
    """The gradients of `attend`.

    Args:
        grad: [T, H, D], of `out`.
        of_turned: [T, H + K, D], written.
        of_qkv: [T, H + 2 K, D], of which v's are written.
    """
    num_heads, dim = out.shape[1], out.shape[2]
    num_kv = turned.shape[1] - num_heads
    group = num_heads // num_kv
    num_tiles = _num_tiles(boundaries, begin, end)
    tiles = np.empty((4, num_tiles, dim, STRIDE), np.float32)
    keys, values, of_keys, of_values = tiles[0], tiles[1], tiles[2], tiles[3]
    plain_keys = np.empty((num_tiles * STRIDE, dim), np.float32)
    of_scores = np.empty((4, num_tiles * STRIDE), np.float32)
    logs, one = logsums.ravel(), float32(1.0)
    for n in range(begin, end):
        token, length = boundaries[n], boundaries[n + 1] - boundaries[n]
        num_rows = length * group
        for kv in range(num_kv):
            _to_tiles(turned, token, num_heads + kv, length, keys)
            _copy(turned, token, num_heads + kv, length, plain_keys)
            _to_tiles(qkv, token, num_heads + num_kv + kv, length, values)
            of_keys[: length // STRIDE + 1] = float32(0.0)
            of_values[: length // STRIDE + 1] = float32(0.0)
            for row in range(0, num_rows, 4):
                q_at = _rows(row, num_rows, group, kv * group, num_heads + num_kv, token, dim)
                out_at = _rows(row, num_rows, group, kv * group, num_heads, token, dim)
                left = num_rows - row
                seen = (
                    row // group + 1,
                    (row + 1) // group + 1 if left > 1 else 0,
                    (row + 2) // group + 1 if left > 2 else 0,
                    (row + 3) // group + 1 if left > 3 else 0,
                    min(row + 3, num_rows - 1) // group + 1,
                )
                a, b, c, e = out_at
                deltas = (
                    _product(grad, out, a, dim),
                    _product(grad, out, b, dim),
                    _product(grad, out, c, dim),
                    _product(grad, out, e, dim),
                )
                sums = (logs[a // dim], logs[b // dim], logs[c // dim], logs[e // dim])
                _weigh(
                    turned, q_at, grad, out_at, keys, values, seen, sums, deltas, scale,
                    of_scores, of_keys, of_values,
                )  # fmt: skip
                _mix(of_scores, plain_keys, seen[4], of_turned, q_at, (one, one, one, one))
            _from_tiles(of_keys, token, num_heads + kv, length, of_turned)
            _from_tiles(of_values, token, num_heads + num_kv + kv, length, of_qkv)
