"""The command line: it runs one command and returns an exit code.

0    done
1    the command failed; the message says why, and where the files are
2    the arguments or the config cannot work; nothing was started
129  SIGHUP ended it in order; 130: SIGINT, 143: SIGTERM. The message says what was saved

The options of a command are the parameters of its function, and the docstring is their help. What takes long
to load is imported when it is needed, so that a signal finds a handler.
"""

import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING

from tailrace import __version__
from tailrace.drivers.assembly.signals import Terminated, signals_received, terminate
from tailrace.errors import ConfigError, Interrupted, TailraceError
from tailrace.kinds import entries, load, package_of, registered

if TYPE_CHECKING:
    from cyclopts import App

COMMANDS = {
    "quickstart": (
        "extras.quickstart.command:quickstart",
        "a small model learns sums: a first run, without files of your own",
    ),
    "init": (
        "extras.init.command:init",
        "write a config and a reward for a model, data and a machine",
    ),
    "train": (
        "drivers.commands.train:run",
        "train a model; all files of the run go into the output directory",
    ),
    "sft": (
        "extras.sft.command:sft",
        "fine-tune a model on given responses; `tailrace train` goes on from its model",
    ),
    "compare": (
        "drivers.commands.compare:compare",
        "compare schedules or values of a setting, from the same weights and prompts; or finished runs",
    ),
    "simulate": (
        "drivers.commands.simulate:simulate",
        "run the schedule in virtual time, on the [sim] section's set-up",
    ),
    "fit": (
        "extras.plan.fit_command:fit_run",
        "costs and lengths of a run or a log, as the [sim] section of a config",
    ),
    "advise": (
        "extras.plan.advise_command:advise",
        "what the longest responses of a run cost, by its log, and which settings of its framework help",
    ),
    "plan": (
        "extras.plan.command:plan",
        "the fastest schedule, division of the devices and widths for [sim.cluster], in virtual time",
    ),
    "check-reward": (
        "extras.audit.command:check_reward",
        "score the data's own answers, and responses that deserve nothing: what the reward pays for",
    ),
    "diagnose": (
        "extras.diagnose.command:diagnose",
        "why engine and trainer disagree on trained tokens, by cause, and what to set",
    ),
    "eval": (
        "drivers.commands.evaluate:run",
        "score held-out prompts with a checkpoint of a run, or with the model of a config",
    ),
    "inspect": ("drivers.commands.inspect:inspect", "what became of every prompt and token of a run"),
    "view": (
        "extras.view.command:view",
        "a page over the files of runs and simulations: lanes, idle times and their causes, samples",
    ),
    "playground": (
        "extras.playground.command:playground",
        "schedules in a browser, simulated while you change lengths, devices and the schedule itself",
    ),
    "join": (
        "extras.cluster.join:join",
        "do the work of one role of a run on another host, which names it in host.join",
    ),
    "push": (
        "extras.hub.command:push",
        "upload the model of a run to the Hugging Face hub, with a model card",
    ),
    "serve": (
        "extras.serve.command:serve",
        "serve a model over HTTP: OpenAI's routes and vLLM's for tokens, pauses and weights; or Tinker's API",
    ),
}
"""The function of each command, and what `tailrace --help` says of it without importing it."""
GROUP = "tailrace.commands"
"""Entry points by which other packages add commands: NAME = MODULE:FUNCTION."""
OVERRIDES = "Any setting of a config can be overridden: --section.key VALUE, for example --run.rounds 5."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a letter that the terminal lacks ends no command
            stream.reconfigure(errors="backslashreplace")
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


def application() -> "App":
    """Return the built-in commands with their options, as cyclopts has them."""
    from cyclopts import App, Parameter

    app = App(
        name="tailrace",
        help="Post-train language models on verifiable rewards.",
        version=__version__,
        help_epilogue=OVERRIDES,
        default_parameter=Parameter(negative=(), parse=re.compile("^(?!overrides$)")),
    )
    for name, (place, summary) in COMMANDS.items():
        app.command(f"tailrace.{place}", name=name, help=summary)
    return app


def _run(argv: Sequence[str]) -> None:
    import pydantic
    from cyclopts import CycloptsError

    app = application()
    for name, (entry, *_) in entries(GROUP).items():
        if argv[:1] == [name]:  # what is wrong with it stops no other command
            registered(GROUP, name, "command", COMMANDS)
            load(entry, "command")
        if name not in COMMANDS:
            app.command(entry.value, name=name, help=f"of {package_of(entry)}")
    words, overrides = _split(argv)
    try:
        function, bound, not_parsed = app.parse_args(words, print_error=False, exit_on_error=False)
    except CycloptsError as why:
        if why.argument and isinstance(why.__cause__, pydantic.ValidationError):  # of keys as options
            from tailrace.config import wrong_options

            raise wrong_options(why.__cause__, why.argument.hint) from why
        problem = re.sub(r"(?<!\.)\.$", "", str(why))
        raise ConfigError("arguments", " ".join(words), problem, "see tailrace COMMAND --help") from why
    if "overrides" in not_parsed:
        bound.arguments["overrides"] = overrides
    elif overrides:
        (key, value), *_ = overrides.items()
        problem = f"{words[0]} has no config to override"
        raise ConfigError(f"--{key}", value, problem, f"see tailrace {words[0]} --help")
    function(*bound.args, **bound.kwargs)


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--a.b value` and `--a.b=value` out of the words."""
    words, overrides, left = [], {}, iter(argv)
    for word in left:
        key, joined, value = word.partition("=")
        if not (key.startswith("--") and "." in key):
            words.append(word)
        elif joined or (value := next(left, "")):
            overrides[key.removeprefix("--")] = value
        else:
            raise ConfigError(key, None, "it has no value", "write --section.key VALUE")
    return words, overrides


if __name__ == "__main__":
    sys.exit(main())
