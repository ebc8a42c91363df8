"""Collectives as tables of messages, which run on devices and have a price in seconds.

    algorithms  messages; collectives with a root: send, broadcast, reduce, gather, scatter; without one: all-gather,
                reduce-scatter, all-to-all, and all-reduces by ring, halving, butterfly, tree and in two levels;
                seconds of a table
    executor    runs a table on devices: every round is a `ppermute`
    programs    all collectives by name, for arrays of any shape inside `shard_map`; prints a table and its effect on
                devices

Terms: `Message`, `Round`, `Part`, a table (rounds), a program (runs a table on devices).

To add an all-reduce: a function of the devices and the part in `algorithms`, and a row of its `ALL_REDUCE`. To add
another collective: its table, a row of `programs.TABLES`, and its program.
"""
