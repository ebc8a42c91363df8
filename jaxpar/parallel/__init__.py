"""The declaration of a user, and the `Layout` that follows from it.

Nouns: `Parallel` (sizes of axes, and how each is used), `Pipeline`, a `Placement` per parameter, and the `Layout`:
where every array of a job lives, and why.
"""
