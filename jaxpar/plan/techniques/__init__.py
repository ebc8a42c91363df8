"""Techniques as a plan prices them, one file each; `table.TECHNIQUES` has those that a search weighs.

To add one: its axis in `jaxpar.mesh.axes`, a file beside `context.py` with a `Technique`, and a row of
`table.TECHNIQUES` (or `with table.added(technique)`, for as long as a test or a script runs). A technique that names
neither sizes nor settings is tried in all sizes that divide what its axis splits; what it sends is priced by what it
yields. Its cause then appears in every plan, page and bar, and its axis in the job that a plan writes.
"""
