"""Functions as jaxprs: the dependencies in them, backward passes that run in two halves in different ticks, what
they keep and where, and functions whose lookups, lengths or dtypes of matmuls are changed before they run.
"""
