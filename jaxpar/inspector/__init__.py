"""Observes what XLA made of a step: memory by cause, every collective, FLOP, a modelled time, and findings.

Nouns: a `Subject` (a lowered program and the names of its arrays), `Facts` (what was found out), `Report` (the same
with its pages), a `Flag` (what should not be), a budget for a user's own tests. `pages/` shows facts and computes
nothing.

To add a finding: a function in `findings.py` and a program in `tests/test_inspect.py` in which it is planted.
"""
