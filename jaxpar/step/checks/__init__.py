"""What a step looks at before it runs: the state that it is given, and the dtypes of the matmuls that it traced.

To add a check: a file here, which `Step` calls where it has what is to be looked at.
"""
