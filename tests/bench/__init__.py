"""Benches of jaxpar itself: `python -m tests.bench.NAME` in a clone; each remembers where it was taken.

To add a bench: a module or folder with a function that returns a table, a row of `command.BENCHES`, and a record under
`records/` with the command, commit and machine.
"""
