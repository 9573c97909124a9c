"""The check of a release: wheel and sdist install in fresh environments, where a run trains.

    make release-check        python benchmarks/release_check.py [PYTHON ...]

1. The version of the package, the newest section of CHANGELOG.md and a tag of the commit agree.
2. `build` makes the sdist, and the wheel from the sdist.
3. The wheel is installed with constraints.txt and the extra `train` in a fresh environment of each PYTHON:
   every command of docs/start/your-own-run.md runs there, as it is printed.
4. `tailrace quickstart` reaches a held-out accuracy of LEAST_ACCURACY in an empty folder, with the sdist in
   the environment of the first PYTHON and with the wheel in the others.
5. The wheel is installed without extras in another fresh environment, which has at most MOST_MB: there each
   command works, on the run of the quickstart, too, or says what to install (without_torch.py).

This runs on the standard library. The exit code is 1 if something failed.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LEAST_ACCURACY = 0.9
MOST_MB = 120
"""Of an environment without extras, in millions of bytes, without pip and setuptools."""
IMPORT = "from time import perf_counter as now; t = now(); import tailrace; tailrace.{}; print(now() - t)"
RELEASED = re.compile(r"(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}")
UNRELEASED = "unreleased"


def disagreements(changelog: str, version: str, tags: Sequence[str]) -> list[str]:
    """Return what keeps a commit from being a release.

    Args:
        changelog: its sections are "VERSION - DATE", the newest first; before them may be "unreleased".
        version: of the package.
        tags: those of the commit; a release has the tag vVERSION.
    """
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    released = sections[sections[:1] == [UNRELEASED] :]
    found = [
        f'CHANGELOG.md: "## {section}" is not "## VERSION - DATE"'
        for section in released
        if not RELEASED.fullmatch(section)
    ]
    newest, *_ = (*(section.partition(" ")[0] for section in released), "nothing")
    if newest != version:
        found.append(f"CHANGELOG.md: the newest version is {newest}, the package's is {version}")
    of_versions = [tag for tag in tags if re.match(r"v?\d", tag)]
    found += [f"the tag {tag} is not v{version}" for tag in of_versions if tag != f"v{version}"]
    if of_versions and released != sections:
        found.append(f'CHANGELOG.md: a release has no section "## {UNRELEASED}"')
    return found


def version_of_package() -> str:
    source = (ROOT / "src/tailrace/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.M)
    return str(version)


def tags_of_commit() -> list[str]:
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False).stdout.split()


def run(*command: str | Path, folder: Path) -> None:
    print("+", *command, flush=True)
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(command, cwd=folder, env=outside, check=True)


def fresh_environment(python: str, folder: Path, package: str) -> Path:
    """Make a virtual environment, install a package, and return its `bin`."""
    run(python, "-m", "venv", folder, folder=folder.parent)
    pip(folder / "bin", "install", "--constraint", ROOT / "constraints.txt", package)
    return folder / "bin"


def pip(programs: Path, command: str, *words: str | Path) -> None:
    run(programs / "pip", "--quiet", "--disable-pip-version-check", command, *words, folder=programs)


def check_pages(programs: Path, package: Path) -> None:
    """Install a package, and run the commands of docs/start/your-own-run.md."""
    pip(programs, "install", "--constraint", ROOT / "constraints.txt", f"{package}[train]", "pytest")
    run(programs / "python", "-m", "pytest", "tests/docs/test_your_own_run.py", folder=ROOT)


def check_quickstart(programs: Path, package: Path, folder: Path) -> float:
    """Install a package in place of another one, train the quickstart in an empty folder, and return the last
    held-out accuracy."""
    pip(programs, "uninstall", "--yes", "tailrace")
    pip(programs, "install", "--constraint", ROOT / "constraints.txt", f"{package}[quickstart]")
    folder.mkdir()
    run(programs / "tailrace", "quickstart", folder=folder)
    summary = json.loads((folder / "runs" / "quickstart" / "summary.json").read_text(encoding="utf-8"))
    return float(summary["eval"]["last"])


def check_base(python: str, package: Path, folder: Path, trained: Path) -> float:
    """Install a package without extras in a fresh environment, call each command there, and return the size
    in millions of bytes. `trained`: a run, which commands read."""
    programs = fresh_environment(python, folder, str(package))
    (site,) = (folder / "lib").glob("python*/site-packages")
    tools = re.compile(r"(pip|setuptools|pkg_resources|_distutils_hack|distutils-precedence)\b")
    files = (path for path in site.rglob("*") if not tools.match(path.relative_to(site).parts[0]))
    size = sum(path.stat().st_size for path in files if path.is_file()) / 1e6
    run(
        programs / "python",
        ROOT / "benchmarks" / "without_torch.py",
        folder / "files",
        trained,
        folder=folder,
    )
    for name in ("__version__", "load_config"):  # the second imports the Python API
        command = [str(programs / "python"), "-c", IMPORT.format(name)]
        took = [float(subprocess.check_output(command, cwd=folder)) for _ in range(5)]
        print(f"import tailrace; tailrace.{name}: {min(took):.3f} s, the least of {len(took)}")
    print(f"{python}, {package.name} without extras: {size:.1f} MB without pip and setuptools", flush=True)
    return size


def main(pythons: Sequence[str]) -> int:
    version = version_of_package()
    failures = disagreements((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, tags_of_commit())
    with TemporaryDirectory() as folder:
        build = fresh_environment(pythons[0], Path(folder) / "build", "build")
        packages = Path(folder) / "packages"
        run(build / "python", "-m", "build", "--outdir", packages, ROOT, folder=Path(folder))
        wheel, sdist = (
            packages / f"tailrace-{version}-py3-none-any.whl",
            packages / f"tailrace-{version}.tar.gz",
        )
        for number, python in enumerate(pythons):
            with TemporaryDirectory() as scratch:
                try:
                    # torch is named first: see the Makefile.
                    programs = fresh_environment(python, Path(scratch) / "environment", "torch")
                    check_pages(programs, wheel)
                    package = wheel if number else sdist
                    accuracy = check_quickstart(programs, package, Path(scratch) / "quickstart")
                    found = f"{python}, {package.name}: held-out accuracy {accuracy:.3f}"
                    print(found, flush=True)
                    if accuracy < LEAST_ACCURACY:
                        failures.append(f"{found} is less than {LEAST_ACCURACY}")
                    trained = Path(scratch) / "quickstart" / "runs" / "quickstart"
                    size = check_base(python, wheel, Path(scratch) / "base", trained)
                    if size > MOST_MB:
                        failures.append(f"{python}: {size:.1f} MB without extras are more than {MOST_MB}")
                except subprocess.CalledProcessError as why:
                    failures.append(f"{python}: {why}")
    print(*failures or [f"tailrace {version} can be released"], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]))
