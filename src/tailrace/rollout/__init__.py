"""The groups in flight: who is served, by which engine, and who goes to the trainer when."""
