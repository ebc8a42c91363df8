"""Inspects the program that XLA compiled for a step: memory by cause, collectives, FLOP, a modelled time, findings.

Nouns: a `Subject` (a lowered program and the names of its arrays), `ReportFacts` (the results), `Report` (the same
with its pages), a `Flag` (a warning), a budget for a user's own tests. `pages/` shows facts and computes
nothing.

To add a finding: a function in `findings.py`, its call in `find_flags`, and a program in
`tests/inspector/test_inspect.py` that triggers it.
"""
