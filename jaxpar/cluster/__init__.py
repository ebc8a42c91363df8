"""Finds the processes of a run: which launcher started them, where the first one is, and whether all have come.

Nouns: a `Launcher`'s variables, a host list, the rendezvous before JAX connects, and the `Peers` that come to it.
Imports no JAX but in `connect`, the last step.

To add a launcher: a reader of its variables and a row of `LAUNCHERS` in `launchers.py`, the innermost launcher first;
and the variables that it exports in `tests/test_processes.py`.
"""
