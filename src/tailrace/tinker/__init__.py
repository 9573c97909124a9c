"""Tinker's API: `tailrace serve --tinker` trains and samples for clients of Tinker's SDK."""
