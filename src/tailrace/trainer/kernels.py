"""What a decoder layer computes row by row, forward and backward, compiled for the CPU in float32.

Torch makes one pass over memory, and one dispatch, an operation; a norm and its gradient are some twenty.
Here each is one pass. They use one thread.
"""

from typing import Any

import numpy as np
from numba import float32
from numpy.typing import NDArray

from tailrace.compiling import kernel
from tailrace.vectors import WIDE, load_first_wide, sigmoid, store_first

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@kernel()
def _scale(square: float, width: int, epsilon: float) -> Any:
    """1 / sqrt(square / width + epsilon); by doubles, since floats would be divided by an estimate."""
    return float32(1.0 / np.sqrt(np.float64(square / float32(width) + epsilon)))


@kernel("(float32[:, ::1], float32[::1], float32, float32[:, ::1], float32[::1])")
def normalize(x: Floats, gain: Floats, epsilon: float, out: Floats, scale: Floats) -> None:
    """RMSNorm (1910.07467, eq. 4) of each row: out = x * scale * gain, scale = 1 / sqrt(mean(x^2) + epsilon).

    Args:
        x, out: [R, D]
        gain: [D]
        scale: [R], written.
    """
    num_rows, width = x.shape
    for row in range(num_rows):
        square = float32(0.0)
        for i in range(width):
            square += x[row, i] * x[row, i]
        s = _scale(square, width, epsilon)
        scale[row] = s
        for i in range(width):
            out[row, i] = x[row, i] * s * gain[i]


@kernel(
    "(float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[::1])",
)
def normalize_backward(
    grad: Floats, x: Floats, gain: Floats, scale: Floats, grad_x: Floats, grad_gain: Floats
) -> None:
    """Adds the gradients of `normalize`, with y = x * scale:

        grad_x += scale * (grad * gain - y * mean(grad * gain * y))
        grad_gain += sum over rows of grad * y

    Args:
        grad, x, grad_x: [R, D]
        gain, grad_gain: [D]
        scale: [R]
    """
    num_rows, width = x.shape
    for row in range(num_rows):
        s = scale[row]
        product = float32(0.0)
        for i in range(width):
            product += grad[row, i] * gain[i] * x[row, i]
        share = product * s * s / float32(width)
        for i in range(width):
            grad_gain[i] += grad[row, i] * x[row, i] * s
            grad_x[row, i] += s * (grad[row, i] * gain[i] - x[row, i] * share)


@kernel(
    "(float32[:, :, ::1], int64, float32[::1], float32[::1], float32, float32[:, ::1], float32[:, ::1],"
    " float32[:, :, ::1], float32[:, ::1])"
)
def turn(
    qkv: Floats,
    num_heads: int,
    q_gain: Floats,
    k_gain: Floats,
    epsilon: float,
    cos: Floats,
    sin: Floats,
    out: Floats,
    scales: Floats,
) -> None:
    """q and k: normalised as by `normalize`, where there are gains, and rotated by their positions (rotary
    embedding, 2104.09864, eq. 34): the pair (d, d + D/2) by its angle.

    Args:
        qkv: [T, H + 2 K, D]
        num_heads: H, of q.
        q_gain, k_gain: [D], or empty.
        cos, sin: [T, at least D/2]
        out: [T, H + K, D], written.
        scales: [T, H + K], written.
    """
    num_tokens, num_turned, dim = out.shape
    half = dim // 2
    normed = len(q_gain) > 0
    for token in range(num_tokens):
        for head in range(num_turned):
            gain = q_gain if head < num_heads else k_gain
            scale = float32(1.0)
            if normed:
                square = float32(0.0)
                for d in range(dim):
                    square += qkv[token, head, d] * qkv[token, head, d]
                scale = _scale(square, dim, epsilon)
            scales[token, head] = scale
            for d in range(half):
                a, b = qkv[token, head, d] * scale, qkv[token, head, d + half] * scale
                if normed:
                    a *= gain[d]
                    b *= gain[d + half]
                c, s = cos[token, d], sin[token, d]
                out[token, head, d] = a * c - b * s
                out[token, head, d + half] = b * c + a * s


@kernel(
    "(float32[:, :, ::1], float32[:, :, ::1], int64, float32[::1], float32[::1], float32[:, ::1],"
    " float32[:, ::1], float32[:, ::1], float32[:, :, ::1], float32[::1], float32[::1])"
)
def turn_backward(
    grad: Floats,
    qkv: Floats,
    num_heads: int,
    q_gain: Floats,
    k_gain: Floats,
    cos: Floats,
    sin: Floats,
    scales: Floats,
    of_qkv: Floats,
    of_q_gain: Floats,
    of_k_gain: Floats,
) -> None:
    """The gradients of `turn`.

    Args:
        grad: [T, H + K, D], of its `out`; spoiled.
        of_qkv: [T, H + 2 K, D], of which q's and k's are written.
        of_q_gain, of_k_gain: [D], added to; or empty.
    """
    num_tokens, num_turned, dim = grad.shape
    half = dim // 2
    normed = len(q_gain) > 0
    for token in range(num_tokens):
        for head in range(num_turned):
            gain = q_gain if head < num_heads else k_gain
            of_gain = of_q_gain if head < num_heads else of_k_gain
            scale = scales[token, head]
            for d in range(half):
                a, b = grad[token, head, d], grad[token, head, d + half]
                c, s = cos[token, d], sin[token, d]
                grad[token, head, d] = a * c + b * s
                grad[token, head, d + half] = b * c - a * s
            if normed:
                product = float32(0.0)
                for d in range(dim):
                    product += grad[token, head, d] * gain[d] * qkv[token, head, d]
                share = product * scale * scale / float32(dim)
                for d in range(dim):
                    x, g = qkv[token, head, d], grad[token, head, d]
                    of_gain[d] += g * x * scale
                    of_qkv[token, head, d] = scale * (g * gain[d] - x * share)
            else:
                for d in range(dim):
                    of_qkv[token, head, d] = grad[token, head, d]


@kernel("(float32[::1], float32[::1], float32[::1])")
def silu_times(gate: Floats, up: Floats, out: Floats) -> None:
    """out = silu(gate) * up (SwiGLU, 2002.05202, eq. 6), [T * intermediate] each."""
    for at in range(0, len(gate), WIDE):
        left = len(gate) - at
        x = load_first_wide(gate, at, left)
        store_first(out, at, x * sigmoid(x) * load_first_wide(up, at, left), left)


@kernel("(float32[::1], float32[::1], float32[::1])")
def silu_times_backward(gate: Floats, up: Floats, grad: Floats) -> None:
    """The gradients of `silu_times` in the place of its inputs, and its `out` in the place of the gradient.

    Args:
        gate, up, grad: [T * intermediate]
    """
    for at in range(0, len(gate), WIDE):
        left = len(gate) - at
        x, y = load_first_wide(gate, at, left), load_first_wide(up, at, left)
        g = load_first_wide(grad, at, left)
        share = sigmoid(x)
        silu = x * share
        store_first(gate, at, g * y * (share + silu * (float32(1.0) - share)), left)
        store_first(up, at, g * silu, left)
        store_first(grad, at, silu * y, left)
