"""Tables of training runs that others published: read, predicted, judged by group, drawn.

    read.py       a CSV file -> runs, each with shape, layout, chip, software and source; contradictions are refused
    stacks.py     what a system is called in such a file -> the software model, and the chips
    judged.py     runs -> predictions, errors, and how good they are by group
    constants.py  what runs are there to fit; fit.py fits it; held_out.py does so without each group in turn
    page.py       errors as a page

To add a software stack: a model of it in `jaxpar.plan.machine`, and a row of `stacks.SYSTEMS`.
"""
