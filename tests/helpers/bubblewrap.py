"""Whether bubblewrap can be used here."""

import shutil
import subprocess

import pytest


def _works() -> bool:
    if shutil.which("bwrap") is None:
        return False
    words = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--unshare-user", "--disable-userns", "true"]
    return subprocess.run(words, capture_output=True).returncode == 0


needs_bubblewrap = pytest.mark.skipif(
    not _works(), reason="bubblewrap is not installed, or user namespaces are not allowed here"
)
