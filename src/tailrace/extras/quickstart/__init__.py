"""For whoever tries tailrace for the first time: a small model and its config ride in the package.

In a checkout they are links to `examples/quickstart/`; a wheel and an sdist have the files.
"""
