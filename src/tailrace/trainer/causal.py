"""Causal attention of packed sequences and its gradient, compiled for the CPU in float32.

Nothing is padded, and nothing of the size of a sequence squared is kept. Four rows, a row being a query head
at a token, go along the keys together, so that heads that share their keys read them once. The softmax is
taken of a whole row, and the backward pass computes it again (FlashAttention, 2205.14135, algorithm 4 without
its blocks: a sequence's keys and values stay in the processor's second cache).

A sequence begins at position 0, or goes on, from a later position, from the last one that did: its rows then
go along the keys of that one, too, up to there. So a prompt is computed once for all that answers it. But for
that sequences are independent: a call computes those from `begin` to `end`, so that threads can share them.

T tokens, H query and K key-value heads of D dimensions, D a multiple of WIDTH, G = H / K. The keys that rows
go along lie in tiles [D, WIDE], so that memory is read in order. `at` names offsets into arrays.
"""

from typing import Any

import numpy as np
from numba import float32

from tailrace.attending import mix, score, softmax
from tailrace.compiling import kernel
from tailrace.trainer.kernels import Floats, Ints
from tailrace.vectors import WIDE, WIDTH, exp, first, load, load_one, load_wide, same, same_wide, store, total


@kernel()
def _to_tiles(x: Floats, root: int, token: int, head: int, start: int, length: int, tiles: Floats) -> None:
    """x at `head` of `start` rows from `root` on, then of rows from `token` on, `length` in all, and zero
    behind in the last tile."""
    for tile in range((length + WIDE - 1) // WIDE):
        for lane in range(WIDE):
            j = tile * WIDE + lane
            row = root + j if j < start else token + j - start
            for d in range(x.shape[2]):
                tiles[tile, d, lane] = x[row, head, d] if j < length else float32(0.0)


@kernel()
def _from_tiles(tiles: Floats, root: int, token: int, head: int, start: int, length: int, x: Floats) -> None:
    """Back to where `_to_tiles` takes them from; added to what is there at the rows from `root` on."""
    for j in range(start):
        for d in range(x.shape[2]):
            x[root + j, head, d] += tiles[j // WIDE, d, j % WIDE]
    for j in range(start, length):
        for d in range(x.shape[2]):
            x[token + j - start, head, d] = tiles[j // WIDE, d, j % WIDE]


@kernel()
def _copy(x: Floats, root: int, token: int, head: int, start: int, length: int, out: Floats) -> None:
    """As `_to_tiles`, row by row."""
    for j in range(length):
        row = root + j if j < start else token + j - start
        for d in range(x.shape[2]):
            out[j, d] = x[row, head, d]


@kernel()
def _num_tiles(boundaries: Ints, starts: Ints, begin: int, end: int) -> int:
    """Of the longest sequence, with what it goes on from."""
    longest = 0
    for n in range(begin, end):
        longest = max(longest, starts[n] + boundaries[n + 1] - boundaries[n])
    return (longest + WIDE - 1) // WIDE


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


@kernel(
    "(float32[:, :, ::1], float32[:, :, ::1], int64[::1], int64[::1], int64, int64, float32,"
    " float32[:, :, ::1], float32[:, ::1])"
)
def attend(
    turned: Floats,
    qkv: Floats,
    boundaries: Ints,
    starts: Ints,
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
        starts: [N]: the positions at which the sequences start; 0 of the one at `begin`.
        out: [T, H, D], written.
        logsums: [T, H], written: of exp(scale q k^T), over the keys.
    """
    num_heads, dim = out.shape[1], out.shape[2]
    num_kv = turned.shape[1] - num_heads
    group = num_heads // num_kv
    num_tiles = _num_tiles(boundaries, starts, begin, end)
    room, tile = num_tiles * WIDE, dim * WIDE
    keys = np.empty((num_tiles, dim, WIDE), np.float32)
    values = np.empty((room, dim), np.float32)
    scores = np.empty((4, room + WIDE), np.float32)
    logs, one = logsums.ravel(), float32(1.0)
    root = boundaries[begin]
    for n in range(begin, end):
        token, start = boundaries[n], starts[n]
        root = token if start == 0 else root
        length = start + boundaries[n + 1] - token
        num_rows = (length - start) * group
        for kv in range(num_kv):
            _to_tiles(turned, root, token, num_heads + kv, start, length, keys)
            _copy(qkv, root, token, num_heads + num_kv + kv, start, length, values)
            for row in range(0, num_rows, 4):
                seen = start + min(row + 3, num_rows - 1) // group + 1
                q_at = _rows(row, num_rows, group, kv * group, num_heads + num_kv, token, dim)
                out_at = _rows(row, num_rows, group, kv * group, num_heads, token, dim)
                score(turned, q_at, dim, keys, 0, tile, WIDE, seen, room, scores, values, 0)
                top_a, a = softmax(scores, 0, start + row // group + 1, seen, scale)
                top_b, b = softmax(scores, 1, start + min(row + 1, num_rows - 1) // group + 1, seen, scale)
                top_c, c = softmax(scores, 2, start + min(row + 2, num_rows - 1) // group + 1, seen, scale)
                top_e, e = softmax(scores, 3, seen, seen, scale)
                shares = (one / a, one / b, one / c, one / e)
                mix(scores, values, 0, dim, seen, shares, out, out_at, keys, 0, tile, WIDE)
                logs[out_at[0] // dim] = top_a + np.log(a)
                logs[out_at[1] // dim] = top_b + np.log(b)
                logs[out_at[2] // dim] = top_c + np.log(c)
                logs[out_at[3] // dim] = top_e + np.log(e)


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
    zero, scale = same_wide(float32(0.0)), float32(scale)
    for j in range(0, seen[4], WIDE):
        a, b, c, e, da, db, dc, de = zero, zero, zero, zero, zero, zero, zero, zero
        at = j * dim
        for d in range(dim):
            k, v = load_wide(keys, at), load_wide(values, at)
            a += k * load_one(q, q_at[0] + d)
            b += k * load_one(q, q_at[1] + d)
            c += k * load_one(q, q_at[2] + d)
            e += k * load_one(q, q_at[3] + d)
            da += v * load_one(grad, grad_at[0] + d)
            db += v * load_one(grad, grad_at[1] + d)
            dc += v * load_one(grad, grad_at[2] + d)
            de += v * load_one(grad, grad_at[3] + d)
            at += WIDE
        a = first(exp(a * scale - logs[0]), seen[0] - j, float32(0.0))
        b = first(exp(b * scale - logs[1]), seen[1] - j, float32(0.0))
        c = first(exp(c * scale - logs[2]), seen[2] - j, float32(0.0))
        e = first(exp(e * scale - logs[3]), seen[3] - j, float32(0.0))
        da = a * (da - deltas[0]) * scale
        db = b * (db - deltas[1]) * scale
        dc = c * (dc - deltas[2]) * scale
        de = e * (de - deltas[3]) * scale
        store(of_scores, j, da)
        store(of_scores, capacity + j, db)
        store(of_scores, 2 * capacity + j, dc)
        store(of_scores, 3 * capacity + j, de)
        at = j * dim
        for d in range(dim):
            k = load_wide(of_keys, at)
            k += da * load_one(q, q_at[0] + d)
            k += db * load_one(q, q_at[1] + d)
            k += dc * load_one(q, q_at[2] + d)
            k += de * load_one(q, q_at[3] + d)
            store(of_keys, at, k)
            v = load_wide(of_values, at)
            v += a * load_one(grad, grad_at[0] + d)
            v += b * load_one(grad, grad_at[1] + d)
            v += c * load_one(grad, grad_at[2] + d)
            v += e * load_one(grad, grad_at[3] + d)
            store(of_values, at, v)
            at += WIDE


@kernel()
def _product(x: Floats, y: Floats, at: int, dim: int) -> Any:
    sums = same(float32(0.0))
    for d in range(0, dim, WIDTH):
        sums += load(x, at + d) * load(y, at + d)
    return total(sums)


@kernel(
    "(float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, ::1],"
    " int64[::1], int64[::1], int64, int64, float32, float32[:, :, ::1], float32[:, :, ::1])"
)
def attend_backward(
    grad: Floats,
    turned: Floats,
    qkv: Floats,
    out: Floats,
    logsums: Floats,
    boundaries: Ints,
    starts: Ints,
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
    num_tiles = _num_tiles(boundaries, starts, begin, end)
    tiles = np.empty((4, num_tiles, dim, WIDE), np.float32)
    keys, values, of_keys, of_values = tiles[0], tiles[1], tiles[2], tiles[3]
    plain_keys = np.empty((num_tiles * WIDE, dim), np.float32)
    of_scores = np.empty((4, num_tiles * WIDE), np.float32)
    logs, one = logsums.ravel(), float32(1.0)
    root = boundaries[begin]
    for n in range(begin, end):
        token, start = boundaries[n], starts[n]
        root = token if start == 0 else root
        length = start + boundaries[n + 1] - token
        num_rows = (length - start) * group
        for kv in range(num_kv):
            _to_tiles(turned, root, token, num_heads + kv, start, length, keys)
            _copy(turned, root, token, num_heads + kv, start, length, plain_keys)
            _to_tiles(qkv, root, token, num_heads + num_kv + kv, start, length, values)
            of_keys[: length // WIDE + 1] = float32(0.0)
            of_values[: length // WIDE + 1] = float32(0.0)
            for row in range(0, num_rows, 4):
                q_at = _rows(row, num_rows, group, kv * group, num_heads + num_kv, token, dim)
                out_at = _rows(row, num_rows, group, kv * group, num_heads, token, dim)
                left = num_rows - row
                seen = (
                    start + row // group + 1,
                    start + (row + 1) // group + 1 if left > 1 else 0,
                    start + (row + 2) // group + 1 if left > 2 else 0,
                    start + (row + 3) // group + 1 if left > 3 else 0,
                    start + min(row + 3, num_rows - 1) // group + 1,
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
                ones = (one, one, one, one)
                mix(of_scores, plain_keys, 0, dim, seen[4], ones, of_turned, q_at, keys, 0, dim * WIDE, WIDE)
            _from_tiles(of_keys, root, token, num_heads + kv, start, length, of_turned)
            _from_tiles(of_values, root, token, num_heads + num_kv + kv, start, length, of_qkv)
