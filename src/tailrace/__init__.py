"""tailrace: post-train language models on verifiable rewards, without waiting for the longest response.

    import tailrace

    config = tailrace.load_config("run.toml", {"run.rounds": 5})
    summary = tailrace.train(config, "runs/first")
    print(summary.eval)

    load_config(file_or_tables, overrides)                          reads and checks a config
    train(config, folder, schedule=, reward=, data=, on=)           trains; returns a RunSummary
    simulate(config, schedule=)                                     the same in virtual time, without a model
    sft(config, folder)                                             fine-tunes on given responses
    evaluate(config_or_folder, checkpoint=, base=)                  scores held-out prompts
    compare(config_or_folders, schedules=, vary=)                   races schedules or values; compares runs
    require(condition, parameter, value, problem, remedy)           refuses a parameter of a schedule

The names of `__all__` are loaded when they are used: `import tailrace` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.api import compare, evaluate, load_config, sft, simulate, train
    from tailrace.config import RunConfig
    from tailrace.controller.run import Run
    from tailrace.drivers.assembly.results import ComparisonSummary, EvaluationSummary
    from tailrace.errors import ConfigError, Interrupted, TailraceError
    from tailrace.record.summary import RunSummary
    from tailrace.rollout.admission import AtMost, Frontier, FrontierFirst
    from tailrace.rollout.order import ORDERS
    from tailrace.schedules.parameters import require
    from tailrace.types import Group, Prompt, Sample

__version__ = "0.2.0"

__all__ = [
    "ORDERS",
    "AtMost",
    "ComparisonSummary",
    "ConfigError",
    "EvaluationSummary",
    "Frontier",
    "FrontierFirst",
    "Group",
    "Interrupted",
    "Prompt",
    "Run",
    "RunConfig",
    "RunSummary",
    "Sample",
    "TailraceError",
    "compare",
    "evaluate",
    "load_config",
    "require",
    "sft",
    "simulate",
    "train",
]

_MODULES = {  # examples/nano.py has those that are not in __all__: some need torch
    "AtMost": "rollout.admission",
    "ComparisonSummary": "drivers.assembly.results",
    "ConfigError": "errors",
    "EvaluationSummary": "drivers.assembly.results",
    "Frontier": "rollout.admission",
    "FrontierFirst": "rollout.admission",
    "GenerationRequest": "contracts.engine",
    "Group": "types",
    "Interrupted": "errors",
    "NativeEngine": "drivers.engine.native.engine",
    "ORDERS": "rollout.order",
    "Prompt": "types",
    "Run": "controller.run",
    "RunConfig": "config",
    "RunSummary": "record.summary",
    "Sample": "types",
    "TailraceError": "errors",
    "TorchTrainer": "drivers.trainer.trainer",
    "TrainingSample": "drivers.trainer.batch",
    "compare": "api",
    "evaluate": "api",
    "group_advantages": "algo.advantages",
    "load_config": "api",
    "require": "schedules.parameters",
    "sft": "api",
    "simulate": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    try:
        return getattr(import_module(f"tailrace.{_MODULES[name]}"), name)
    except ModuleNotFoundError as why:
        from tailrace.importing import TRAINING, install

        if why.name not in TRAINING:
            raise
        raise ImportError(f"tailrace.{name} needs {why.name}: {install('train')}", name=why.name) from None


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__version__"]
