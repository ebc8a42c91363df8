"""Finds the processes of a run: their launcher and the address of process 0; and connects them.

Terms: a `Launcher`'s variables, a host list, the rendezvous before JAX connects, and the `Peers` that join it.
Imports JAX only in `connect`, the last step.

To add a launcher: a reader of its variables and a row of `LAUNCHERS` in `launchers.py`, the innermost launcher first;
and the variables that it exports in `tests/launch/test_processes.py`.
"""
