"""Functions as jaxprs: the dependencies in them, and backward passes that run in two halves in different ticks."""
