"""Write the playground as static files: python docs/make_playground.py FOLDER [DOWNLOADS]

It needs npm, for Python as WebAssembly (Pyodide), and pip, for the packages that the simulator imports. Both
ask the registries that they are configured for. requirements/playground.lock has each file by its SHA-256.
"""

import inspect
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import msgspec
import tomli_w

from reproductions import april, pipelinerl_runs, rolloutpipe, rollpacker_runs
from tailrace.config import leaves
from tailrace.extras.playground.simulation import Question, SimulationAnswer, answer, source_of
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimSettings

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements" / "playground.lock"
PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
CORE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
    "README.md",
)
OF_VIEW = ("format.js", "words.js", "lanes.js", "palette.css", "page.css")
"""Files of the page of a run, which draw here, too."""
FIRST = ("serial", "rolloutpipe", "april", "tailrace")
"""Schedules whose answers are computed now, so that the page has pictures before Python has started."""


class Preset(msgspec.Struct, frozen=True):
    """A set-up of the page."""

    title: str
    note: str
    config: str
    """A TOML file."""
    values: Mapping[str, Any]
    """Its values by dotted key."""
    schedules: Sequence[str]
    """Those that the page shows with it."""


def preset(title: str, note: str, tree: dict[str, Any], *schedules: str) -> Preset:
    return Preset(title, note, tomli_w.dumps(tree), dict(leaves(tree)), schedules)


def presets() -> dict[str, Preset]:
    """The page's own set-up, those of four papers as their reproductions have them, and two of examples/."""
    tail = (files("tailrace.extras.playground") / "tail.toml").read_text(encoding="utf-8")
    settings = [each for each in april.PRINTED if (each.model, each.algorithm) == ("Qwen3-4B", "GRPO")]
    cluster, planned = (
        tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("cluster", "cluster_plan")
    )
    cluster["run"]["rounds"] = 1  # 2,048 samples
    planned["placement"] = {"kind": "colocated"}
    of_rolloutpipe = rolloutpipe.SIM.changed(lengths={"median_tokens": rolloutpipe.MEDIANS["Sci-XW"]})
    earlier = pipelinerl_runs.EARLIER.sim(slots=pipelinerl_runs.IN_FLIGHT)
    return {
        "tail": preset(
            "A strong tail",
            "Eight H100 generate for a model of 7B parameters, two train it.",
            tomllib.loads(tail),
            *FIRST,
        ),
        "rolloutpipe": preset(
            "RolloutPipe, Sci-XW, R = 32",
            "Qwen3-1.7B on A100-40G. Two costs are fitted (reproductions/rolloutpipe.py).",
            paper(of_rolloutpipe, 32, rolloutpipe.U, group_size=rolloutpipe.K),
            *("serial", "rolloutpipe", "rolloutpipe_eager"),
        ),
        "april": preset(
            "APRIL, Qwen3-4B, GRPO",
            "Eight MI300X generate and train in turn. The lengths are fitted (reproductions/april.py).",
            paper(april.sim_settings(settings[0]), april.N, april.N, group_size=april.K, rounds=4),
            *("serial", "april"),
        ),
        "pipelinerl": preset(
            "PipelineRL, the earlier version",
            "32 H100, of which 16 generate; a quarter of the batch (reproductions/pipelinerl_runs.py).",
            paper(earlier, pipelinerl_runs.BATCH // 4, pipelinerl_runs.BATCH // 4, group_size=1, rounds=4),
            *("serial", "pipelinerl"),
        ),
        "rollpacker": preset(
            "RollPacker, Qwen2.5-7B, 8k",
            "16 H800 generate and train in turn. Two costs are fitted (reproductions/rollpacker_runs.py).",
            paper(
                rollpacker_runs.SMALL.sim(),
                rollpacker_runs.P0,
                rollpacker_runs.P0,
                group_size=rollpacker_runs.R0,
            ),
            *("serial", "tailbatch", "rollpacker"),
        ),
        "cluster": preset(
            "examples/cluster.toml",
            "64 engines and 2,048 samples: a picture takes seconds.",
            cluster,
            *("serial", "april", "tailrace"),
        ),
        "cluster_plan": preset(
            "examples/cluster_plan.toml",
            "Eight H100 generate and train in turn.",
            planned,
            *("serial", "april", "rollpacker"),
        ),
    }


def paper(sim: SimSettings, groups: int, step: int, *, group_size: int, rounds: int = 2) -> dict[str, Any]:
    """The sections of a paper's set-up for rounds of so many groups, in steps of so many."""
    in_turn = sim.cluster is not None and sim.cluster.rollout_devices is None
    parameters = {name: inspect.signature(schedule).parameters for name, schedule in SCHEDULES.items()}
    one_step = [
        name
        for name, each in parameters.items()
        if "groups_per_round" in each and "groups_per_step" not in each
    ]
    return {
        "run": {"rounds": rounds, "group_size": group_size},
        "algorithm": {"advantage": "group" if group_size > 1 else "batch"},
        "placement": {"kind": "colocated" if in_turn else "disaggregated"},
        "schedule": {"name": "serial", "groups_per_round": groups, "groups_per_step": step},
        "schedules": {name: {"groups_per_round": groups} for name in one_step}
        | {"pipelinerl": {"in_flight_per_engine": pipelinerl_runs.IN_FLIGHT // 4}},
        "sim": sim.model_dump(mode="json", exclude_none=True, exclude_unset=True),
    }


def locked() -> dict[str, str]:
    """The files to download, each with its SHA-256."""
    rows = (line.split() for line in LOCK.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in rows}


def download(folder: Path, lock: Mapping[str, str]) -> None:
    """Get what the folder lacks, and check all of it. Ends the program if one is missing or is another."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in lock if not is_whole(folder / name, lock[name])]
    wheels = ["==".join(name.split("-")[:2]) for name in missing if name.endswith(".whl")]
    cores = [name.removesuffix(".tgz").replace("-", "@") for name in missing if name.endswith(".tgz")]
    where = ["--platform", PLATFORM, "--python-version", PYTHON, "--only-binary=:all:"]
    commands: list[Sequence[str]] = [
        ["npm", "pack", "--silent", "--pack-destination", str(folder), *cores]
    ] * bool(cores)
    if wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        commands.append([*pip, *where, "--dest", str(folder), *wheels])
    for command in commands:
        if shutil.which(command[0]) is None:
            sys.exit(f"{command[0]}: this program is not installed; the playground needs it")
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"{' '.join(command)}: it failed; the playground needs what it downloads")
    for name in lock:
        if not is_whole(folder / name, lock[name]):
            sys.exit(f"{folder / name}: it is not the file of {LOCK.name}, by its SHA-256; delete it")


def is_whole(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path.read_bytes()).hexdigest() == digest


COMPILE = """
const { loadPyodide } = await import(`${process.argv[1]}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: process.argv[1] });
python.FS.mkdir("/packages");
python.FS.mount(python.FS.filesystems.NODEFS, { root: process.argv[2] }, "/packages");
python.runPython(`
import compileall, py_compile
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # unpacked files have another time
assert compileall.compile_dir("/packages", quiet=1, invalidation_mode=unchecked)
`);
"""
"""A program of Node, which npm comes with: Python of the browser compiles the modules, once."""


def make(folder: Path, downloads: Path) -> None:
    """Write the playground. What is there is replaced if it is a playground."""
    if folder.exists() and not (folder / "first.json").exists() and any(folder.iterdir()):
        sys.exit(f"{folder}: it has other files; name an empty folder")
    lock = locked()
    download(downloads, lock)
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("view", "pyodide"):
        (folder / name).mkdir(parents=True)
    with TemporaryDirectory() as scratch:
        packages = Path(scratch)
        unpack(downloads, lock, folder / "pyodide", packages)
        subprocess.run(
            ["node", "--input-type=module", "--eval", COMPILE, str((folder / "pyodide").resolve()), scratch],
            check=True,
        )
        shutil.make_archive(str(folder / "packages"), "zip", packages)
    own, of_view = (files(f"tailrace.extras.{product}") / "static" for product in ("playground", "view"))
    for each in own.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    for name in OF_VIEW:
        (folder / "view" / name).write_bytes((of_view / name).read_bytes())
    (folder / "page.html").rename(folder / "index.html")
    found = presets()
    written: Mapping[str, object] = {
        "presets.json": found,
        "schedules.json": {name: source_of(name) for name in SCHEDULES},
        "first.json": {name: first(found["tail"], name) for name in FIRST},
    }
    for name, content in written.items():
        (folder / name).write_bytes(msgspec.json.encode(content))


def unpack(downloads: Path, lock: Mapping[str, str], core: Path, packages: Path) -> None:
    """Take out what the page needs: Python itself, and the packages with that of the checkout."""
    for name in lock:
        if name.endswith(".whl"):
            with ZipFile(downloads / name) as wheel:
                wheel.extractall(packages)
            continue
        with tarfile.open(downloads / name) as archive:
            for member in CORE:
                opened = archive.extractfile(f"package/{member}")
                assert opened, member
                (core / member).write_bytes(opened.read())
    source = ROOT / "src"
    for path in sorted((source / "tailrace").rglob("*")):
        if path.suffix in (".py", ".toml"):
            copy = packages / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def first(of: Preset, name: str) -> SimulationAnswer:
    """The answer to the question that the page asks first."""
    asked = Question(of.config, {"placement.kind": "disaggregated"}, name)
    answered = answer(asked)
    assert isinstance(answered, SimulationAnswer), answered
    return answered


def main() -> None:
    folder, *others = map(Path, sys.argv[1:])
    make(folder, others[0] if others else ROOT / "build" / "downloads")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"playground {folder}  {size / 1e6:.1f} MB; tailrace playground --folder {folder} serves it")


if __name__ == "__main__":
    main()
