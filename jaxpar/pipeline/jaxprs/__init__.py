"""Functions as jaxprs: the dependencies in them, backward passes that run in two halves in different ticks, and
functions whose lookups, lengths or dtypes of matmuls are changed before they run.
"""
