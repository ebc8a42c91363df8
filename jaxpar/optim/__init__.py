"""Gradients become updates. optax wherever optax has it."""
