"""Names devices: axis sizes in, a `jax.sharding.Mesh` out, on real, simulated or absent devices.

Nouns: an `Axis` (what it splits, whether it sees other examples), a `Chip` with the source of each number, a `Target`
(GPUs that are not there), a `Collective`, a `Link`, and the memory `Pool` that a run takes of a GPU.

To add an axis: a row of `axes.AXES`, and the technique that uses it in `parallel/techniques`; an axis that no technique
uses is refused. To add a chip: a row of `chips.py` with its data sheet, and its key in `tests/test_chips.py`. With a
`Gpu` XLA can compile for it; with a row of `plan/machine/hardware.HARDWARE`, constants that were measured on it, it can
be planned for. A user's own chip is a TOML file and needs no code.
"""
