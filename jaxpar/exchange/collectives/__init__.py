"""Collectives as tables of messages: replayed on numbers, run on devices, priced.

    messages    the nouns: a message, a round of them, and parts of an array
    rooted      send, broadcast, reduce, gather, scatter: one device gives to all, or gets from all
    algorithms  among equals: all-gather, reduce-scatter, all-to-all, and all-reduces by ring, halving, butterfly, tree
                and in two levels
    replay      the effect of a table on numbers
    run         runs a table on devices: every round is a `ppermute`
    programs    all of them by name, for arrays of any shape inside `shard_map`
    price       seconds of a table
    shown       a table and its effect, as text

Nouns: `Message`, `Round`, `Part`, a table (rounds), a program (runs a table on devices).

To add an all-reduce: a function of the devices and the part in `algorithms`, and a row of its `ALL_REDUCE`. To add
another collective: its table, a row of `programs.TABLES`, and its program.
"""
