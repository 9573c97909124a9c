"""Benchmarks are scripts. Those with parts worth a test are imported from their folders."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "race")]
