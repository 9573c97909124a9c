"""The output directory of a run.

config.toml      resolved: every default is written out
metrics.jsonl    one object for each optimizer step
summary.json     the totals of the run
samples/         what was trained on, a file for each round
events.jsonl     what happened when, of all processes of the run (record/events.py)
checkpoints/     round_000010/: a Hugging Face folder and the state of the optimizer
model/           the newest checkpoint as a plain Hugging Face folder; with LoRA merged, and adapter/ in it
ledger.sqlite    the fate of each token and prompt, and the state of the run at each checkpoint
counts/          how many tokens each engine produced, by its own count
logs/            what the worker processes printed
tensorboard/     what trackers write here, as does wandb/
reward.pkl       the reward function, where a script or a notebook gave it
rows.jsonl       the rows of the data, where a script or a notebook gave them
lock             held by the process that trains here; the system releases it when that process ends. Its time
                 is that at which workers began to start
.tailrace        the names of these that tailrace wrote, and may replace (contracts/mark.py)
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import EDQUOT, EFBIG, EMFILE, ENFILE, ENOENT, ENOSPC, EROFS, EWOULDBLOCK
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from tailrace import __version__, clock
from tailrace.config import Config, RunConfig, load_config
from tailrace.contracts.engine import COUNTS_FOLDER
from tailrace.contracts.mark import Mark, claim, read_mark, remove
from tailrace.contracts.trainer import is_checkpoint
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, STATE_FOLDER, replacing, seal_model
from tailrace.errors import ConfigError, DiskFull, FolderLost, disk_remedy
from tailrace.ledger.recovery import StartingPoint
from tailrace.ledger.store import LEDGER_FILE
from tailrace.record.events import Recorder, Row, RunStarted, Sink
from tailrace.record.metrics import MetricsWriter
from tailrace.record.run_log import LogWriter
from tailrace.record.samples import SamplesWriter
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary

_EACH = ("config.toml", "metrics.jsonl", "summary.json")
_SIMULATION = (*_EACH, "events.jsonl")
_MODEL = ("model", "model.partial", "model.old.partial")
_LEDGER = (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm")
_SFT = (*_EACH, "metrics.partial", "checkpoints", *_MODEL, *_LEDGER, "logs", "lock")
_RUN = (*_SFT, "events.jsonl", "samples", COUNTS_FOLDER)
WRITTEN = {"train": _RUN, "quickstart": _RUN, "sft": _SFT, "simulate": _SIMULATION, "compare": _SIMULATION}
"""The names that each command writes into the folder of a run. Trackers and sinks have names of their own.
A reward function and rows that a script gives are files, too; a ledger in memory is none."""
_REWARD, _ROWS = "reward.pkl", "rows.jsonl"
_ALIAS = "quickstart", "train"
COMPARED_VIRTUALLY = ("compare.json",)
COMPARED = (*COMPARED_VIRTUALLY, "logs", "start", "start.partial", "start.old.partial")
"""The names that a comparison writes beside the folders of its candidates."""


def earlier_run(path: Path) -> tuple[str, Collection[str]]:
    """Return the command of a release without marks whose run or comparison is in a folder, and the names
    that it wrote."""
    folder = RunFolder(path)
    is_sealed = any(folder.checkpoints.glob(f"round_*/{CHECKSUMS_FILE}"))
    if folder.lock.exists() and (is_sealed or (path / LEDGER_FILE).exists()):
        is_sft = not folder.events.exists() and not (path / LEDGER_FILE).exists()
        return "sft" if is_sft else "train", (*_RUN, _REWARD, _ROWS)
    with suppress(OSError, msgspec.MsgspecError), folder.events.open("rb") as file:
        msgspec.json.decode(file.readline(), type=RunStarted)
        if folder.lock.exists():
            return "train", (*_RUN, _REWARD, _ROWS)
        return "compare" if (path.parent / "compare.json").exists() else "simulate", _SIMULATION
    with suppress(OSError, KeyError, msgspec.MsgspecError):
        msgspec.json.decode((path / "compare.json").read_bytes(), type=dict[str, object])["schedules"]
        return "compare", COMPARED
    return "", ()


def runs_in(folders: Sequence[Path], is_run: Callable[[Path], bool]) -> list[tuple[str, Path]]:
    """The runs in some folders, by short names that differ: those of one name have their paths as names. A
    folder is that of a run, or has such folders in it, as that of a comparison. Another stands for itself."""
    found: list[Path] = []
    for folder in folders:
        inner = sorted(filter(is_run, folder.iterdir())) if folder.is_dir() and not is_run(folder) else []
        found += inner or [folder]
    names = [path.resolve().name for path in found]
    labels = names if len({*names}) == len(names) else map(str, found)
    return list(zip(labels, found, strict=True))


class RunFolder:
    def __init__(
        self, path: Path, *, has_reward: bool = False, has_rows: bool = False, has_ledger: bool = True
    ) -> None:
        """`has_reward`, `has_rows`: a script gives these, and the folder gets them. `has_ledger`: the folder
        gets one."""
        self.path, self.not_written = path, () if has_ledger else _LEDGER
        self.given = (*(_REWARD,) * has_reward, *(_ROWS,) * has_rows)
        self.config = path / "config.toml"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.adapter = self.model / "adapter"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.summary = path / "summary.json"
        self.events = path / "events.jsonl"
        self.counts = path / COUNTS_FOLDER
        self.lock = path / "lock"
        self.reward = path / _REWARD
        self.rows = path / _ROWS

    @property
    def version(self) -> str:
        """The release whose files are in the folder; "": one that did not write it."""
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            if mark := read_mark(self.path):
                return mark.version
        return ""

    @property
    def command(self) -> str:
        """The command whose files are in the folder; "": there are none."""
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            if mark := read_mark(self.path):
                return mark.command if any(mark.owned_in(self.path)) else ""
        return earlier_run(self.path)[0]

    def check_wrote(self, what: str, *commands: str, key: str = "RUN") -> None:
        """Raises a ConfigError of a key if another command wrote the folder. `what`: only these write it."""
        if (command := self.command) and command.replace(*_ALIAS) not in commands:
            problem = f"tailrace {command} wrote it, without {what}"
            remedy = f"name a run of tailrace {' or '.join(commands)}"
            raise ConfigError(key, str(self.path), problem, remedy)

    def read_config(self, overrides: Mapping[str, str] | None = None) -> RunConfig:
        """Read config.toml, as `load_config`. An error names the file, because a command of users did not,
        and says if another version of tailrace wrote the run."""
        if not self.config.exists():
            self.check_wrote("a config", "train", "sft", "simulate")
            problem, remedy = "there is no run in it", "name the output directory of a run"
            if self.command:
                problem, remedy = f"its {self.config.name} is missing", "put it back, or name another run"
            raise ConfigError("RUN", str(self.path), problem, remedy)
        try:
            return load_config(self.config, overrides)
        except ConfigError as why:
            of_another = self.command and self.version != __version__
            writer = " (another version of tailrace wrote it)" if of_another else ""
            why.args = (f"{self.config}{writer}: {why}",)
            raise

    def kept(self, config: Config) -> Config:
        """The config as the folder keeps it: without the folder's own path, because it may be moved."""
        function = (config.reward.function or "").replace(f"{self.reward.resolve()}:", f"{self.reward.name}:")
        kept = config.changed(reward={"function": function or None})
        is_own = getattr(config.data, "path", None) == self.rows.resolve()
        return kept.changed(data={"path": Path(self.rows.name)}) if is_own else kept

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the latest round, and in it of the latest optimizer step."""
        return max(filter(is_checkpoint, self.checkpoints.glob("round_*")), default=None)

    def claim(self, command: str, *, names: Collection[str] = (), only_check: bool = False) -> Mark:
        """Own what a command writes here, as `contracts.mark.claim`. Raises a ConfigError also if the folder
        holds a run of another command; `train` goes on with a quickstart. `names`: in place of `WRITTEN`."""
        if (held := self.command) and command not in (held, held.replace(*_ALIAS)):
            problem = f"it holds a run of tailrace {held}"
            raise ConfigError("--output-dir", str(self.path), problem, "choose another")
        written = (*(name for name in WRITTEN[command] if name not in self.not_written), *self.given)
        names, earlier = names or written, earlier_run(self.path)[1]
        return claim(self.path, command, names, earlier, only_check=only_check, version=__version__)

    def clear(self, *, keep: Collection[str] = (*_LEDGER, "logs", "lock", _REWARD)) -> None:
        """Delete what the mark owns, such as what a run that trained nothing left behind."""
        mark = read_mark(self.path)
        for path in mark.owned_in(self.path) if mark else ():
            if path.name not in keep:
                remove(path)

    def begin_anew(self, command: str, config: str) -> None:
        """Replace the files of an earlier simulation, or of an earlier trial of a comparison, and write
        config.toml. Raises as `claim`."""
        self.claim(command)
        self.clear()
        self.config.write_text(config, encoding="utf-8")

    @contextmanager
    def locked(self, command: str = "train") -> Iterator[Mark]:
        """Keep other processes from training in the folder, and claim it; its run stays that of its command.
        Yields its earlier mark. Raises a ConfigError if another process trains in it, and as `claim`."""
        self.claim(command, only_check=True)
        try:
            with ExitStack() as stack:
                mark, descriptor = self.claim(self.command or command), os.open(self.path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                stack.enter_context(FileLock(self.lock).acquire(timeout=0))
                try:  # for the case that the file `lock` was deleted: the folder itself is locked, too
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as why:
                    if why.errno == EWOULDBLOCK:  # other errors are those of file systems without such locks
                        raise
                held = stack.pop_all()
        except OSError as why:
            problem, remedy = f"it cannot be written ({why.strerror})", "choose another"
            if isinstance(why, BlockingIOError | Timeout):
                problem, remedy = "another process is training in it", "let that one end, or choose another"
            raise ConfigError("--output-dir", str(self.path), problem, remedy) from None
        with held:
            yield mark

    @contextmanager
    def shortage_explained(self) -> Iterator[None]:
        """Turn an OSError of a full disk into a DiskFull that names the file and the remedy, one of a folder
        that is gone or read-only into a FolderLost, one of too few file descriptors into a ConfigError."""
        try:
            yield
        except OSError as why:
            if why.errno in (EMFILE, ENFILE):
                import resource  # a browser, which simulates, has none

                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                problem = f"the run needs more file descriptors ({why.strerror})"
                raise ConfigError("ulimit -n", limit, problem, "raise it, for example to 1024") from why
            where = Path(why.filename or self.path)
            is_lost = why.errno == EROFS or (why.errno == ENOENT and self.path in where.parents)
            if not is_lost and why.errno not in (ENOSPC, EDQUOT, EFBIG):
                raise
            said = f"{where}: {why.strerror}; {disk_remedy(why)}, then --resume"
            raise (FolderLost if is_lost else DiskFull)(said) from why

    def export(self, checkpoint: Path) -> Path:
        """Write the model of a checkpoint as a plain Hugging Face folder, in place of an earlier one.

        Weights are hard links where the file system has them. Small files are copies: a user may edit them.
        """
        ignore = shutil.ignore_patterns(STATE_FOLDER, f"{CHECKSUMS_FILE}*")
        with replacing(self.model) as new:
            shutil.copytree(checkpoint, new, ignore=ignore, copy_function=_link_weights, dirs_exist_ok=True)
            seal_model(new, checkpoint)
        return self.model


def recorder_of(
    folder: RunFolder | None,
    summary: Summary,
    *others: Sink,
    start: StartingPoint | None = None,
    earlier: Sequence[Row] = (),
    token_samples: int | None = None,
    waits: Callable[[], Mapping[str, float]] = dict,
) -> Recorder:
    """Return the recorder of a run, live or in virtual time.

    Args:
        folder: for metrics and events; None: there are no files.
        summary: written after the log, because the page takes summary.json for the last file.
        start, earlier: of a resumed run, where it goes on, and the rows before that.
        token_samples: as [record] has it; None: no samples are written.
        waits: what tasks wait for; a simulation has none.
    """
    files: list[Sink] = []
    if folder:
        start = start or StartingPoint()
        place = {"round": start.base.round, "version": start.base.version, "step": start.base.step}
        files.append(MetricsWriter(folder.metrics))
        if token_samples is not None:
            files.append(SamplesWriter(folder.samples, token_samples=token_samples))
        files.append(LogWriter(folder.events, waits=waits, life=start.life, **place))
    return Recorder(StepMeter(*files, summary, *others, wall_clock=clock.wall_time, earlier=earlier))


def _link_weights(file: str, target: str) -> None:
    if file.endswith(".safetensors"):
        with suppress(OSError):
            os.link(file, target)
            return
    shutil.copy(file, target)
