"""Nothing is lost: the fate of every token and prompt, and what a checkpoint must remember."""
