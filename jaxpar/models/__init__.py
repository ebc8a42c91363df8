"""Reference models. They know names of dims, never of meshes.

To add a model: a file with its settings and module, and a row of `job/parts/models.MODELS` if jobs may name it.
"""
