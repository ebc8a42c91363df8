"""Functions as jaxprs: what depends on what, and backward passes that run in two halves at different times."""
