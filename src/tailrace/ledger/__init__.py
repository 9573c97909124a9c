"""Nothing is lost: the fate of every token and prompt, in memory and in a store that outlives the process."""
