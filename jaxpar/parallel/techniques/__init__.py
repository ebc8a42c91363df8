"""Techniques of parallelism, one file each: everything that the declaration, the layout and the step need of them.

    when       hooks of a technique   who calls them, in all_techniques.py
    declared   problems, names        declaration_problems, all_dim_names
    composed   idle, resolve          idle_problems refuses an axis that does nothing; resolve
    traced     how, bind              islands implements the functions that a model calls, such as jp.attention
    lowered    check                  check verifies the technique's requirements of the model in the program

Terms: a `Technique` and the axis that it communicates over, its implementations (`how`), a model's `ModelUse` names.

To add a technique: its axis in `jaxpar.mesh.axes`, a file beside `tensor.py` with a `Technique`, a row of
`all_techniques.TECHNIQUES`, and its price in `jaxpar.plan.techniques`. To add a way of bringing sequence shards
together: a file beside `attention_gather.py` and a row of `context.HOW`. A test or a script adds either with
`all_techniques.with_technique`.
"""
