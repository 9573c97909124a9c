"""Benchmarks are scripts; those with parts worth a test are imported from where they stand."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
