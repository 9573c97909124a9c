"""What a decoder layer computes row by row, forward and backward, compiled for the CPU in float32.

Torch makes one pass over memory, and one dispatch, an operation; a norm and its gradient are some twenty.
Here each is one pass. They use one thread.
"""

import numpy as np
from numba import float32
from numpy.typing import NDArray

from tailrace.compiling import kernel

Floats = NDArray[np.float32]


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
        s = float32(1.0) / np.sqrt(square / float32(width) + epsilon)
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


@kernel("(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32)")
def rotate(x: Floats, cos: Floats, sin: Floats, direction: float) -> None:
    """Rotary embedding (2104.09864, eq. 34) of all heads, in place: the pair (d, d + D/2) by its angle.

    Args:
        x: [T, H, D]
        cos, sin: [T, at least D/2]
        direction: 1, or -1 to rotate back, which is the gradient.
    """
    num_tokens, num_heads, dim = x.shape
    half = dim // 2
    for token in range(num_tokens):
        for head in range(num_heads):
            for d in range(half):
                a, b = x[token, head, d], x[token, head, d + half]
                c, s = cos[token, d], sin[token, d] * direction
                x[token, head, d] = a * c - b * s
                x[token, head, d + half] = b * c + a * s
