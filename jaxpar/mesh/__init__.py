"""Builds a `jax.sharding.Mesh` from axis sizes, on real, simulated or absent devices.

Terms: an `Axis` (the dims that it splits, whether it splits the batch), a `Chip` with a source per number, a `Target`
(absent GPUs to compile for), a `Collective`, a `Link`, and the memory `Pool` that a run allocates on a GPU.

To add an axis: write a row of `axes.AXES`, and the technique that uses it in `parallel/techniques`; an axis that no
technique uses is refused. To add a chip: write a row of `chips.py` with its data sheet, and its key in
`tests/mesh/test_chips.py`. With a `Gpu`, XLA can compile for it; with a row of `plan/machine/hardware.HARDWARE`
(measured constants), the planner can use it. A user's own chip is a TOML file and needs no code.
"""
