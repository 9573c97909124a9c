"""Benchmarks are scripts. Those with parts worth a test are imported from their folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
