"""For rewards that a model gives: a judge behind an endpoint, or on the devices of the run."""
