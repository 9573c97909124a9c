"""For whoever begins a run: `tailrace init` writes a config and a reward that fit a machine."""
