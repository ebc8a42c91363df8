"""Measurements that remember where they were taken.

To add a bench: a file with a function that returns a table, a row of `cli/bench.py`, and a record under `records/`
with the command, commit and machine.
"""
