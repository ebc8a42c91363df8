"""The declaration of a user, and the `Layout` that follows from it.

    Parallel, model, devices ─► compose ─► Layout: specs, mesh, schedule, and why; or every problem at once

Nouns: `Parallel` (sizes of axes, and how each is used), `Pipeline`, a `Placement` per parameter, a `Technique` per
axis, and the `Layout`: where every array of a job lives, and why.

To add a technique, or another way to run one: see `techniques`. To add a key of the declaration: a field of `Parallel`
with its meaning, from where job files and `--print-defaults` have it, and a check in the technique that reads it.
"""
