"""Cost and length models of a simulation, fitted to the files of a run."""
