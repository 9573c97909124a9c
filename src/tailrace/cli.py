"""The command line: it runs one command and returns an exit code.

0    done
1    the command failed; the message says why, and where the files are
2    the arguments or the config cannot work; nothing was started
129  SIGHUP ended it in order; 130: SIGINT, 143: SIGTERM. The message says what was saved

Modules that take long to load are imported by the functions that need them, so that a signal finds a handler.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tailrace import __version__
from tailrace.commands.signals import Terminated, signals_received, terminate
from tailrace.errors import ConfigError, Interrupted, TailraceError

OVERRIDES = "any setting of the config can be overridden: --section.key VALUE, for example --run.rounds 5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        with signals_received(terminate):
            _run(sys.argv[1:] if argv is None else argv)
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


def _run(argv: Sequence[str]) -> None:
    """Call the function of a command with its options, and with the config or the overrides that it takes."""
    parser = _parser(is_served="serve" in argv[:1])
    arguments, words = parser.parse_known_args(argv)
    options: dict[str, Any] = vars(arguments)
    command, function, takes = (options.pop(name) for name in ("command", "function", "takes"))
    overrides = _overrides(parser, words) | {key: options.pop(key) for key in [*options] if "." in key}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if takes == "config":
        from tailrace.config import load_config

        options["config"] = load_config(options["config"], overrides)
    elif takes == "overrides":
        options["overrides"] = overrides
    else:
        for key, value in overrides.items():
            problem = f"{command} has no config to override"
            raise ConfigError(f"--{key}", value, problem, f"see tailrace {command} --help")
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(**options)


def _overrides(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, str]:
    """Read the words `--a.b value` and `--a.b=value`."""
    overrides = {}
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        key, *words = words
        if not key.startswith("--") or "." not in key or not words:
            parser.error(f"unknown argument {key}; {OVERRIDES}")
        overrides[key.removeprefix("--")], *words = words
    return overrides


def _parser(*, is_served: bool) -> argparse.ArgumentParser:
    """The commands with their options. An option with a dot in its name overrides that key of the config.

    Args:
        is_served: whether to add the options of `serve` that are settings, which take long to import.
    """
    parser = argparse.ArgumentParser(
        prog="tailrace", description="Post-train language models on verifiable rewards."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(
        name: str, function: str, summary: str, *, config: str = "CONFIG.toml", takes: str = "config"
    ) -> argparse.ArgumentParser:
        epilog = OVERRIDES if takes else None
        sub = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        if config:
            dest = "path" if config.startswith("RUN") else "config"
            sub.add_argument(dest, type=Path, metavar=config)
        sub.set_defaults(function=f"tailrace.{function}", takes=takes)
        return sub

    def json_option(sub: argparse.ArgumentParser, what: str) -> None:
        sub.add_argument("--json", dest="json_path", type=Path, metavar="F", help=what)

    summary = "train a model; all files of the run go into the output directory"
    sub = add("train", "commands.train:run", summary)
    sub.add_argument("--output-dir", type=Path, required=True, metavar="D")
    sub.add_argument("--resume", action="store_true", help="continue the run in D, if one has begun there")
    sub.add_argument("--dry-run", action="store_true", help="check the config, print it resolved, and stop")

    summary = "compare schedules: the same weights, prompts and seeds for each"
    sub = add("compare", "commands.compare:compare", summary)
    sub.add_argument(
        "--schedules",
        dest="compare.schedules",
        type=lambda names: str(names.split(",")),
        metavar="A,B",
        help="instead of compare.schedules",
    )
    sub.add_argument("--repeats", dest="compare.repeats", metavar="N", help="instead of compare.repeats")
    sub.add_argument("--virtual", action="store_true", help="in virtual time; no model is needed")
    sub.add_argument("--output-dir", dest="folder", type=Path, metavar="D", help="the files of each schedule")
    json_option(sub, "the medians")

    summary = "run the schedule in virtual time, on the [sim] section's set-up"
    sub = add("simulate", "commands.simulate:run", summary, takes="overrides")
    sub.add_argument(
        "--output-dir", dest="folder", type=Path, metavar="D", help="metrics, summary and events"
    )
    found = "with the costs and lengths of this run, instead of [sim]"
    sub.add_argument("--like", dest="like_run", type=Path, metavar="RUN", help=found)
    json_option(sub, "the summary")

    summary = "the costs and lengths of a run, as the [sim] section of a config"
    sub = add("fit", "commands.fit:fit_run", summary, config="RUN", takes="")
    sub.add_argument("--output", type=Path, metavar="F.toml", help="where [sim] goes; printed without it")

    summary = "the fastest schedule, division of the devices and widths for [sim.cluster], in virtual time"
    sub = add("plan", "commands.plan:plan", summary, config="CLUSTER.toml")
    found = "responses are as long as those of this run; 'model' or without it: as in [sim.lengths]"
    sub.add_argument("--lengths", default="model", metavar="RUN", help=found)
    sub.add_argument("--output", type=Path, metavar="F.toml", help="a config with the fastest candidate")
    json_option(sub, "all candidates that were measured")

    summary = "score held-out prompts with the newest checkpoint of a run, or with the model of a config"
    sub = add("eval", "commands.evaluate:run", summary, config="RUN or CONFIG.toml", takes="overrides")
    sub.add_argument("--model", type=Path, metavar="M", help="weights instead: a Hugging Face folder")
    json_option(sub, "the accuracy")

    summary = "what became of every prompt and token of a run"
    sub = add("inspect", "commands.inspect:run", summary, config="RUN", takes="overrides")
    sub.add_argument("--group", dest="prompt", type=int, metavar="N", help="the life of one prompt's group")
    sub.add_argument("--json", dest="as_json", action="store_true")

    summary = "a page over the files of runs and simulations: lanes, idle times and their causes, samples"
    sub = add("view", "commands.view:view", summary, config="", takes="")
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="output directories; only read")
    where = sub.add_mutually_exclusive_group()
    where.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1; by default a free one")
    where.add_argument("--output", type=Path, metavar="F.html", help="write the page as one file instead")
    perfetto = "write the events of one run for ui.perfetto.dev instead"
    where.add_argument("--perfetto", type=Path, metavar="F.json", help=perfetto)

    summary = "do the work of one role of a run on another host, which names it in host.join"
    sub = add("join", "workers.join:join", summary, config="", takes="")
    sub.add_argument("role", choices=("trainer", "reference", "engine", "reward"))
    sub.add_argument("address", metavar="HOST:PORT", help="as host.listen of the run")
    found = "the token that the run prints; without it: $TAILRACE_JOIN_TOKEN"
    sub.add_argument("--token", metavar="T", help=found)

    summary = "serve a model over HTTP: OpenAI's routes, and vLLM's for tokens, pauses and new weights"
    sub = add("serve", "commands.serve:run", summary, config="", takes="")
    sub.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder")
    found = (
        "has the bearer token, or receives a new one; without it: $TAILRACE_TOKEN, or a new one is printed"
    )
    sub.add_argument("--token-file", type=Path, metavar="F", help=found)
    if is_served:
        from tailrace.commands.serve import settings_of_options

        for name, field in settings_of_options().items():
            kind = {int: int, float: float}.get(field.annotation, str)  # type: ignore[arg-type]
            what = str(field.description).partition(". ")[0].rstrip(".")
            what += "" if field.is_required() or field.default is None else f"; {field.default} by default"
            sub.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what)
    return parser


if __name__ == "__main__":
    sys.exit(main())
