"""Runs a table inside one compiled program: ticks as loops, stages, and the messages between them."""
