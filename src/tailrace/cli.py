"""The command line: it runs one command and returns an exit code.

0    done
1    the command failed; the message says why, and where the files are
2    the arguments or the config cannot work; nothing was started
129  SIGHUP ended it in order; 130: SIGINT, 143: SIGTERM. The message says what was saved

Modules that take long to load are imported by the functions that need them, so that a signal finds a handler.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace import __version__
from tailrace.commands.signals import Terminated, signals_received, terminate
from tailrace.errors import ConfigError, Interrupted, TailraceError

if TYPE_CHECKING:
    from tailrace.config import RunConfig

SERVER_OPTIONS: Mapping[str, tuple[type, str]] = {
    "host": (str, "the address to listen on; 127.0.0.1 by default"),
    "port": (int, "8000 by default; 0: a free one"),
    "served_model_name": (str, "the model's name in requests; MODEL by default"),
    "weights_folder": (Path, "new weights are read from safetensors files below it; none by default"),
    "max_body_bytes": (int, "the largest request body; 33554432 by default"),
}
"""Options of `serve` that are ServeSettings."""
ENGINE_OPTIONS: Mapping[str, tuple[type, str]] = {
    "dtype": (str, "float32 or bfloat16; float32 by default"),
    "device": (str, "cpu, cuda or cuda:N; cpu by default"),
    "threads": (int, "torch threads; 1 by default"),
    "max_num_seqs": (int, "requests that are decoded together; 128 by default"),
    "kv_cache_tokens": (int, "size of the KV cache; 262144 by default"),
    "health_timeout_s": (float, "seconds in which the engine must answer, or the server ends; 60 by default"),
    "max_prefill_tokens": (int, "prompt tokens computed between two decode steps; 8192 by default"),
}
"""Options of `serve` that are NativeEngineSettings."""
OVERRIDES = "any setting of the config can be overridden: --section.key VALUE, for example --run.rounds 5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        with signals_received(terminate):
            arguments, overrides = _parse(sys.argv[1:] if argv is None else argv)
            command: Callable[[argparse.Namespace, Mapping[str, str]], None] = arguments.command
            command(arguments, overrides)
    except ConfigError as why:
        print(f"tailrace: {why}", file=sys.stderr)
        return 2
    except Interrupted as why:
        print(f"tailrace: {why}", file=sys.stderr)
        return 128 + why.signal
    except TailraceError as why:
        print(f"tailrace: {type(why).__name__}: {why}", file=sys.stderr)
        return 1
    except Terminated as why:
        print("tailrace: interrupted; nothing was saved", file=sys.stderr)
        return 128 + why.signal
    return 0


def _config(path: Path, overrides: Mapping[str, str]) -> "RunConfig":
    from tailrace.config import load_config

    return load_config(path, overrides)


def _train(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.live import check_live
    from tailrace.commands.train import train
    from tailrace.config import with_model_folder
    from tailrace.schedules.resolve import resolve

    config = _config(arguments.config, overrides)
    if arguments.dry_run:
        config = with_model_folder(config)
        fitted = check_live(config, resolve(config))
        print(fitted.config.toml(), end="")
        print(textwrap.indent(fitted.table, "# "))  # still TOML
        return
    train(config, arguments.output_dir, resume=arguments.resume)


def _compare(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.compare import compare

    given = dict(overrides)
    if arguments.schedules is not None:
        given["compare.schedules"] = str(arguments.schedules.split(","))
    if arguments.repeats is not None:
        given["compare.repeats"] = str(arguments.repeats)
    config = _config(arguments.config, given)
    compare(config, virtual=arguments.virtual, folder=arguments.output_dir, json_path=arguments.json)


def _simulate(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.fit import like
    from tailrace.commands.simulate import simulate

    config = _config(arguments.config, overrides)
    if arguments.like:
        for key in overrides:
            if key.startswith("sim."):
                remedy = f"remove it, or use the [sim] that tailrace fit {arguments.like} prints"
                raise ConfigError(f"--{key}", overrides[key], "--like replaces all of [sim]", remedy)
        config = like(config, arguments.like)
    simulate(config, folder=arguments.output_dir, json_path=arguments.json)


def _fit(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.fit import fit_run

    _refuse_overrides("fit", overrides)
    fit_run(arguments.config, output=arguments.output)


def _plan(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.plan import plan

    config = _config(arguments.config, overrides)
    plan(config, lengths=arguments.lengths, output=arguments.output, json_path=arguments.json)


def _evaluate(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.evaluate import evaluate_model, evaluated_config

    config = evaluated_config(arguments.config, arguments.model, overrides)
    evaluate_model(config, json_path=arguments.json)


def _inspect(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.folder import RunFolder
    from tailrace.commands.inspect import inspect

    folder = RunFolder(arguments.config)
    folder.require_run()
    config = _config(folder.config, overrides)
    inspect(config, folder.path, prompt=arguments.group, as_json=arguments.json)


def _join(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.workers.join import join

    _refuse_overrides("join", overrides)
    join(arguments.stage, arguments.broker, arguments.run)


def _refuse_overrides(command: str, overrides: Mapping[str, str]) -> None:
    for key, value in overrides.items():
        problem = f"{command} has no config to override"
        raise ConfigError(f"--{key}", value, problem, f"see tailrace {command} --help")


def _serve(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.serve import given, serve
    from tailrace.engine.serve.settings import ServeSettings
    from tailrace.engine.settings import NativeEngineSettings

    _refuse_overrides("serve", overrides)
    options = vars(arguments)
    engine = given(NativeEngineSettings, {name: options[name] for name in ENGINE_OPTIONS})
    named = {"served_model_name": str(arguments.model)}
    server = given(
        ServeSettings, named | {name: v for name in SERVER_OPTIONS if (v := options[name]) is not None}
    )
    serve(arguments.model, engine, server, token_file=arguments.token_file)


def _view(arguments: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from tailrace.commands.view import view

    _refuse_overrides("view", overrides)
    view(arguments.runs, port=arguments.port, output=arguments.output, perfetto=arguments.perfetto)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Mapping[str, str]]:
    parser = argparse.ArgumentParser(
        prog="tailrace", description="Post-train language models on verifiable rewards."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Callable[..., None],
        summary: str,
        config: str = "CONFIG.toml",
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=OVERRIDES)
        sub.add_argument("config", type=Path, metavar=config)
        sub.set_defaults(command=command)
        return sub

    train = add("train", _train, "train a model; all files of the run go into the output directory")
    train.add_argument("--output-dir", type=Path, required=True, metavar="D")
    train.add_argument("--resume", action="store_true", help="continue the run in D, if one has begun there")
    train.add_argument("--dry-run", action="store_true", help="check the config, print it resolved, and stop")
    compare = add("compare", _compare, "compare schedules: the same weights, prompts and seeds for each")
    compare.add_argument("--schedules", metavar="A,B", help="instead of compare.schedules")
    compare.add_argument("--repeats", type=int, metavar="N", help="instead of compare.repeats")
    compare.add_argument("--virtual", action="store_true", help="in virtual time; no model is needed")
    compare.add_argument(
        "--output-dir", type=Path, metavar="D", help="the files of each schedule, and compare.json"
    )
    compare.add_argument("--json", type=Path, metavar="F", help="the medians")
    summary = "run the schedule in virtual time, on the [sim] section's set-up"
    simulate = add("simulate", _simulate, summary)
    simulate.add_argument("--output-dir", type=Path, metavar="D", help="metrics, summary and events")
    simulate.add_argument(
        "--like", type=Path, metavar="RUN", help="with the costs and lengths of this run, instead of [sim]"
    )
    simulate.add_argument("--json", type=Path, metavar="F", help="the summary")
    fit = add("fit", _fit, "the costs and lengths of a run, as the [sim] section of a config", config="RUN")
    fit.epilog = None  # it has no config to override
    fit.add_argument("--output", type=Path, metavar="F.toml", help="where [sim] goes; printed without it")
    planned = "the fastest schedule, division of the devices and widths for [sim.cluster], in virtual time"
    plan = add("plan", _plan, planned, config="CLUSTER.toml")
    found = "responses are as long as those of this run; 'model' or without it: as in [sim.lengths]"
    plan.add_argument("--lengths", default="model", metavar="RUN", help=found)
    plan.add_argument("--output", type=Path, metavar="F.toml", help="a config with the fastest candidate")
    plan.add_argument("--json", type=Path, metavar="F", help="all candidates that were measured")
    scored = "score held-out prompts with the newest checkpoint of a run, or with the model of a config"
    evaluate = add("eval", _evaluate, scored, config="RUN or CONFIG.toml")
    evaluate.add_argument("--model", type=Path, metavar="M", help="weights instead: a Hugging Face folder")
    evaluate.add_argument("--json", type=Path, metavar="F", help="the accuracy")
    inspect = add("inspect", _inspect, "what became of every prompt and token of a run", config="RUN")
    inspect.add_argument("--group", type=int, metavar="N", help="the life of one prompt's group")
    inspect.add_argument("--json", action="store_true")
    summary = "a page over the files of runs and simulations: lanes, idle times and their causes, samples"
    view = commands.add_parser("view", help=summary, description=summary)
    view.set_defaults(command=_view)
    view.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output directories; only read")
    where = view.add_mutually_exclusive_group()
    where.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1; by default a free one")
    where.add_argument("--output", type=Path, metavar="F.html", help="write the page as one file instead")
    perfetto = "write the events of one run for ui.perfetto.dev instead"
    where.add_argument("--perfetto", type=Path, metavar="F.json", help=perfetto)
    summary = "do the work of one stage of a run that has a [broker], from any host"
    join = commands.add_parser("join", help=summary, description=summary)
    join.add_argument("stage", choices=("trainer", "reference"))
    join.add_argument("--broker", required=True, metavar="URL", help="redis://HOST:PORT/0, as broker.url")
    join.add_argument("--run", required=True, metavar="NAME", help="name of the run's output directory")
    join.set_defaults(command=_join)
    summary = "serve a model over HTTP: OpenAI's routes, and vLLM's for tokens, pauses and new weights"
    serve = commands.add_parser("serve", help=summary, description=summary)
    serve.set_defaults(command=_serve)
    serve.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder")
    for name, (kind, summary) in {**SERVER_OPTIONS, **ENGINE_OPTIONS}.items():
        serve.add_argument("--" + name.replace("_", "-"), type=kind, help=summary)
    found = (
        "has the bearer token, or receives a new one; without it: $TAILRACE_TOKEN, or a new one is printed"
    )
    serve.add_argument("--token-file", type=Path, metavar="F", help=found)
    arguments, rest = parser.parse_known_args(argv)
    return arguments, _overrides(parser, rest)


def _overrides(parser: argparse.ArgumentParser, words: Sequence[str]) -> Mapping[str, str]:
    """Read the words `--a.b value` and `--a.b=value`."""
    overrides = {}
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        key, *words = words
        if not key.startswith("--") or "." not in key or not words:
            parser.error(f"unknown argument {key}; {OVERRIDES}")
        overrides[key.removeprefix("--")], *words = words
    return overrides


if __name__ == "__main__":
    sys.exit(main())
