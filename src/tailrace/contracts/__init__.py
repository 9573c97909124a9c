"""Contracts of engine, trainer, transport, prompts, rewards and environments with the controller: protocols
and settings, without torch."""
