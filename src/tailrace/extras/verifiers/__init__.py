"""For tasksets of the package verifiers (pip install tailrace[verifiers])."""
