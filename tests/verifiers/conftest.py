"""The tasksets of this folder are importable by their names, as installed ones are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "tasksets"))
