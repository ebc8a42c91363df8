"""Blockwise attention: no array holds the scores of every query and key, forward or backward.

    pairs     table of the blocks of queries and blocks of keys that meet
    rule      which keys a query sees: a function of positions and segments
    cutting   splits sequences into chunks and blocks, and joins them again
    kernel    one scan over a table of pairs, forward and backward
    fused     cuDNN's kernel as two calls, with its float32 statistics, for attention over a part of the keys
    trial     checks that kernel on the device before its first use
    attention attention on one device, with its own backward pass
    whole_scores attention that materializes all scores, where keys are gathered
    documents documents packed into one row, carried through the layers

A ring over devices (`parallel/techniques/ring_attention/ring.py`) scans the same tables while keys arrive and leave.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r heads that share one of those,
k head_dim; n blocks, q queries of a block, c keys of a block.
"""
