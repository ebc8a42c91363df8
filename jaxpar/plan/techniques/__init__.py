"""Techniques as a plan prices them, one file each; `table.TECHNIQUES` has those that a search weighs.

To add one: a file beside `tensor.py` with a `Technique`, and a row of `table.TECHNIQUES`. Its cause then appears in
every plan, page and bar.
"""
