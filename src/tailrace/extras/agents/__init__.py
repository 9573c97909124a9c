"""For programs that call a model over HTTP: their requests become the turns of an episode."""
