"""Runs a table inside one compiled program: its ticks as loops, its stages, and the messages between them."""
