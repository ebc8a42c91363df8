"""Inspects the program that XLA compiled for a step: memory by cause, collectives, FLOP, a modelled time, findings.

Terms: a `Subject` (a lowered program and the names of its arrays), `ReportFacts` (the results of its inspection), a
`Report` (the facts and their pages), a `Flag` (a warning), a budget (a limit that a user's own tests check). `pages/`
shows facts and computes nothing.

To add a finding: a function in `findings.py`, its call in `find_flags`, and a program in
`tests/inspector/test_inspect.py` that triggers it.
"""
