"""tailrace: post-train language models on verifiable rewards, without waiting for the longest response.

    import tailrace

    config = tailrace.load_config("run.toml", {"run.rounds": 5})
    summary = tailrace.train(config, "runs/first")
    print(summary.eval)

The names of `__all__` are loaded when they are used: `import tailrace` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.api import load_config, simulate, train
    from tailrace.config import RunConfig
    from tailrace.controller.run import Run
    from tailrace.errors import ConfigError, Interrupted, TailraceError
    from tailrace.record.summary import RunSummary

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Interrupted",
    "Run",
    "RunConfig",
    "RunSummary",
    "TailraceError",
    "load_config",
    "simulate",
    "train",
]

_MODULES = {
    "ConfigError": "errors",
    "Interrupted": "errors",
    "Run": "controller.run",
    "RunConfig": "config",
    "RunSummary": "record.summary",
    "TailraceError": "errors",
    "load_config": "api",
    "simulate": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    return getattr(import_module(f"tailrace.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
