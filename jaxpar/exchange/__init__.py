"""Collectives as tables of messages, and what they cost.

Nouns: an algorithm (rounds of messages between devices), its replay message by message, and its cost in alpha-beta
form, on one level of links or on two.

To add an algorithm: its rounds in `algorithms.py` and its formula in `cost.py`; tests hold the formula to the replay.
"""
