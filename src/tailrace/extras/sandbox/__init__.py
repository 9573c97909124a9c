"""For rewards that run test cases: programs of the model in a sandbox."""
