"""Collectives as tables of messages: replayed on numbers, run on devices, priced.

    messages    the nouns: a message, a round of them, and parts of an array
    rooted      send, broadcast, reduce, gather, scatter: one device gives to all, or gets from all
    algorithms  among equals: all-gather, reduce-scatter, all-to-all, and all-reduces by ring, halving, butterfly, tree
                and in two levels
    replay      what a table does, on numbers
    run         what it does on devices: every round is a `ppermute`
    programs    all of them by name, for arrays of any shape inside of `shard_map`
    price       how long a table takes
    shown       a table and what it does, in text

Nouns: `Message`, `Round`, `Part`, a table (rounds), a program (what runs a table on devices).

To add an all-reduce: a function of the devices and the part in `algorithms`, and a row of its `ALL_REDUCE`. To add
another collective: its table, a row of `programs.TABLES`, and its program.
"""
