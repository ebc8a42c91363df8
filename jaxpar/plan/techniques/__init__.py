"""Costs of parallel techniques, one file each; a search tries those in `table.TECHNIQUES`.

To add one: an axis in `jaxpar.mesh.axes`, a file here with a `PlanTechnique`, and a row of `table.TECHNIQUES` (or `with
table.added(technique)` in a test or a script). Without `sizes` and `settings`, a search tries all sizes that divide the
dims that the axis splits. The collectives that it yields are priced; its cause then appears in every plan, page and
bar, and its axis in the job that a plan writes.
"""
