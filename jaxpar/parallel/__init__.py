"""Composes the user's declaration, a model and devices into a `Layout`.

    Parallel, model, devices ─► compose ─► Layout: specs, mesh, schedule, and why; or every problem at once

Terms: `Parallel` (sizes of axes, and how each is used), `Pipeline`, a `Placement` per parameter, a `Technique` per
axis, and the `Layout`: the sharding of every array of a job, and the rules that chose it.

To add a technique, or another way to run one: see `techniques`. To add a key of the declaration: a field of `Parallel`
with its meaning in the docstring, which job files and `--print-defaults` show, and a check in its technique.
"""
