"""The command line: words in, one command run, an exit code out.

0  done
1  the run failed; the message says what, and where its files are
2  the config cannot work; nothing was started
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tailrace import __version__
from tailrace.config import RunConfig, load_config
from tailrace.errors import ConfigError, TailraceError

OVERRIDES = "any setting of the config can be overridden: --section.key VALUE, for example --run.rounds 5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        arguments, overrides = _parse(sys.argv[1:] if argv is None else argv)
        command: Callable[[argparse.Namespace, RunConfig], None] = arguments.command
        command(arguments, load_config(arguments.config, overrides))
    except ConfigError as why:
        print(f"tailrace: {why}", file=sys.stderr)
        return 2
    except TailraceError as why:
        print(f"tailrace: {type(why).__name__}: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tailrace: interrupted; what was saved can be resumed with --resume", file=sys.stderr)
        return 130
    return 0


def _train(arguments: argparse.Namespace, config: RunConfig) -> None:
    from tailrace.commands.train import train

    train(config, arguments.output_dir, resume=arguments.resume, dry_run=arguments.dry_run)


def _compare(arguments: argparse.Namespace, config: RunConfig) -> None:
    from tailrace.commands.compare import compare

    names = arguments.schedules and tuple(arguments.schedules.split(","))
    given = {"schedules": names, "repeats": arguments.repeats}
    race = config.compare.model_copy(update={key: value for key, value in given.items() if value})
    config = config.model_copy(update={"compare": race})
    compare(config, virtual=arguments.virtual, folder=arguments.output_dir, json_path=arguments.json)


def _simulate(arguments: argparse.Namespace, config: RunConfig) -> None:
    from tailrace.commands.simulate import simulate

    simulate(config, folder=arguments.output_dir, json_path=arguments.json)


def _evaluate(arguments: argparse.Namespace, config: RunConfig) -> None:
    from tailrace.commands.evaluate import evaluate_model

    evaluate_model(config, json_path=arguments.json)


def _inspect(arguments: argparse.Namespace, config: RunConfig) -> None:
    from tailrace.commands.inspect import inspect

    inspect(config, arguments.config.parent, prompt=arguments.group, as_json=arguments.json)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Mapping[str, str]]:
    parser = argparse.ArgumentParser(
        prog="tailrace", description="Post-train language models on verifiable rewards, without bubbles."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., None], summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=OVERRIDES)
        sub.add_argument("config", type=Path, metavar="CONFIG.toml")
        sub.set_defaults(command=command)
        return sub

    train = add("train", _train, "train a model; everything about the run goes into the output directory")
    train.add_argument("--output-dir", type=Path, required=True, metavar="D")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in D")
    train.add_argument("--dry-run", action="store_true", help="check the config, print it resolved, and stop")
    compare = add("compare", _compare, "race schedules from the same weights on the same prompts and seeds")
    compare.add_argument("--schedules", metavar="A,B", help="instead of compare.schedules")
    compare.add_argument("--repeats", type=_positive, metavar="N", help="instead of compare.repeats")
    compare.add_argument("--virtual", action="store_true", help="in virtual time; no model is needed")
    compare.add_argument("--output-dir", type=Path, metavar="D", help="pictures and traces")
    compare.add_argument("--json", type=Path, metavar="F", help="the medians")
    simulate = add("simulate", _simulate, "run the schedule in virtual time, on the [sim] section's set-up")
    simulate.add_argument("--output-dir", type=Path, metavar="D", help="metrics, summary, trace and picture")
    simulate.add_argument("--json", type=Path, metavar="F", help="the summary")
    evaluate = add("eval", _evaluate, "sample held-out prompts from a model and score them")
    evaluate.add_argument("--json", type=Path, metavar="F", help="the accuracy")
    inspect = commands.add_parser("inspect", help="what became of every prompt and token of a run")
    inspect.add_argument("config", type=lambda folder: Path(folder) / "config.toml", metavar="RUN")
    inspect.add_argument("--group", type=int, metavar="N", help="the life of one prompt's group")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(command=_inspect)
    arguments, rest = parser.parse_known_args(argv)
    return arguments, _overrides(parser, rest)


def _overrides(parser: argparse.ArgumentParser, words: Sequence[str]) -> Mapping[str, str]:
    """--a.b value, --a.b=value."""
    overrides = {}
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        key, *words = words
        if not key.startswith("--") or "." not in key or not words:
            parser.error(f"unknown argument {key}; {OVERRIDES}")
        overrides[key.removeprefix("--")], *words = words
    return overrides


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
