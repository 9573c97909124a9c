"""For environments behind servers of OpenEnv (pip install openenv)."""
