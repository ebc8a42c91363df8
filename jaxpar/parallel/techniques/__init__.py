"""Techniques of parallelism, one file each: everything that the declaration, the layout and the step need of them.

    declared   problems, names        asked.declared, asked.names_of
    composed   idle                   asked.idle: refuses an axis that does nothing
    traced     how                    asked.traced: implements the islands that a model calls, such as jp.attention; the
                                      step hands in the answer to choices that are left to a plan (open_choice)
    lowered    check                  asked.check: checks the program for the technique's requirements of the model

Nouns: a `Technique` and the axis that it communicates over, its implementations (`how`), a model's `ModelUse` names.

To add a technique: its axis in `jaxpar.mesh.axes`, a file beside `tensor.py` with a `Technique`, a row of
`table.TECHNIQUES`, and its price in `jaxpar.plan.techniques`. To add a way of bringing sequence shards together: a file
beside `attention_gather.py` and a row of `context.HOW`. A test or a script adds either with `table.with_technique`.
"""
