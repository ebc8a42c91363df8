"""Devices with names: axis sizes in, a `jax.sharding.Mesh` out, on real or simulated devices."""
