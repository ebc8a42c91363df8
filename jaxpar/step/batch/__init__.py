"""The batch of a step: from numbers of any kind to arrays on the devices of a layout.

shard_batch        rows that divide, placed over the axes that split the batch
lists_in_a_batch   lists and tuples of views, which are refused with the way out
"""
