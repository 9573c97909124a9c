"""The papers' own set-ups in virtual time, and their tables beside ours."""
