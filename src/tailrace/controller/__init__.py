"""The controller: one asyncio process that owns a run. It moves tokens, never weights."""
