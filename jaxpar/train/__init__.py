"""The loop of a run: batches in, metrics, evaluations and checkpoints out, and what happens when something goes
wrong.

Nouns: a `Run` and its `Outcome`, `Faults` (what to do about bad numbers), a rollback, skipped batches, the lock of a
run folder, metrics, and the watchdog by which processes notice each other's end.
"""
