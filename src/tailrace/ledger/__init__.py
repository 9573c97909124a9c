"""Records what becomes of each token and each prompt, in memory and in a store that outlives the process."""
