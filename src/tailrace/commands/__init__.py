"""What the command line does: each file is one command, from a checked config to files on disk."""
