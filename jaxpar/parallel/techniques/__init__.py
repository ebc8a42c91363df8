"""Techniques of parallelism, one file each: what the declaration, the layout and the step need to know of them.

    declared   problems, names        asked.declared, asked.names_of
    composed   idle                   asked.idle: no axis may do nothing
    traced     how                    asked.traced: what runs the islands that a model calls, such as jp.attention; what
                                      it leaves to a plan is asked of what the step hands in (open_choice)
    lowered    check                  asked.check: what the technique needs of the model, seen in its program

Nouns: a `Technique` and the axis that it communicates over, a way (`how`) of running it, what a model has `Used`.

To add a technique: its axis in `jaxpar.mesh.axes`, a file beside `tensor.py` with a `Technique`, a row of
`table.TECHNIQUES`, and its price in `jaxpar.plan.techniques`. To add a way of bringing pieces of sequences together: a
file beside `attention_gather.py` and a row of `context.HOW`. A test or a script adds either with `table.added`.
"""
