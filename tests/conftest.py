"""Shared by all tests; its presence lets them import the helpers that stand beside it."""
