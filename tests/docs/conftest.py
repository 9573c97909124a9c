"""The scripts of docs/ are imported from their folder; record_story from that of its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
sys.path.append(str(Path(__file__).parents[1] / "record"))
