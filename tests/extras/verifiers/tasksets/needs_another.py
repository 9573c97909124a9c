"""A taskset whose package needs what is not installed."""

import not_installed_anywhere  # noqa: F401
