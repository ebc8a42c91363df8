"""Data, state, step, loop, checkpoints, metrics."""
