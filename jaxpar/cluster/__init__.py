"""Finds the processes of a run: which launcher started them, where the first one is, and whether all have come.

Nouns: a `Launcher`'s variables, a host list, the rendezvous before JAX connects, and the `Peers` that come to it.
Imports no JAX but in `connect`, the last step.

To add a launcher: its variables as a row of the table in `launchers.py`, and what it exports in
`tests/test_processes.py`.
"""
