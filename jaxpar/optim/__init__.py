"""Optimizers and learning-rate schedules by name, made of optax's own parts."""
