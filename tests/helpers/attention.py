"""What scaled_dot_product_attention is called with."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class AttentionCall(NamedTuple):
    key_shape: tuple[int, ...]
    kernels: set[str]
    """Those that torch may choose."""


class AttentionCalls(TorchFunctionMode):
    """Inside the block each call is noted, and made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            kernels = {name for name in KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}
            key = kwargs["key"] if "key" in kwargs else args[1]
            self.made.append(AttentionCall(tuple(key.shape), kernels))
        return func(*args, **kwargs)


KERNELS = ("flash", "mem_efficient", "math", "cudnn")
WITHOUT_PLANS = {"flash", "mem_efficient", "math"}
"""Those that make no plan for each shape."""
