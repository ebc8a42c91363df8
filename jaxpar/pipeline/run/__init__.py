"""Runs a table inside one compiled program: its ticks as loops, the stages, and what travels between them."""
