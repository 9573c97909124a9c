"""Its presence lets the tests import the helpers that stand beside it."""
