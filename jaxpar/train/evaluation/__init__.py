"""Held-out examples that do not fill a batch, each counted once."""
