"""Measurements of the user's own machine and job: `jaxpar measure gemm`, `links` and `layers`.

    machine      ─► tables `gemm` and `links` of a chip's file (record.py), for `jaxpar plan --chip FILE`
    layer_times  ─► a profile of a model, for `jaxpar partition`

Terms: a *destination* is the chip file that a measurement is written to; a *record* names the devices, versions and
commit of a number. To add a measurement: a module with a function that returns a table, and a row of `cli/measure.py`.
"""
