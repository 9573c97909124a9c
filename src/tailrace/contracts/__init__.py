"""What the controller asks of an engine, a trainer, a transport, prompts, rewards and environments:
protocols and settings, without torch."""
