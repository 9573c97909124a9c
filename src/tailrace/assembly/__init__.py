"""From a config to a run: its schedule, its checks, its parts live or virtual, its folder."""
