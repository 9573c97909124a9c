"""For clients and users of Tinker's API: `tailrace serve --tinker`, and training at such a service."""
