"""The parts of a run on one machine: the embedded engine, the trainer, the transports, the worker
processes, and the assembly of a run."""
