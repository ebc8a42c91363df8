"""Techniques of parallelism, one file each: what the declaration, the layout and the step need to know of them.

To add one: its axis in `jaxpar.mesh.axes`, a file beside `tensor.py` with a `Technique`, a row of `table.TECHNIQUES`,
and its price in `jaxpar.plan.techniques`.
"""
