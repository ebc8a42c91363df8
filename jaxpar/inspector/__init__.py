"""Inspects the program that XLA compiled for a step: memory by cause, collectives, FLOP, a modelled time, findings.

A `Subject` is a lowered program with the names of its arrays. `ReportFacts` are the results of its inspection, a
`Report` also renders them, and a `Flag` is a warning. A budget is a limit that a user's own tests check. `pages/` shows
facts and computes nothing.

To add a finding: a function in `findings.py`, its call in `find_flags`, and a program in
`tests/inspector/test_inspect.py` that triggers it.
"""
