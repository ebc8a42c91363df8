"""Checks before a step runs: the input state, and the dtypes of the traced matmuls.

To add a check: a file here, called by `Step` where its inputs are available.
"""
