"""Blockwise attention: no array holds the scores of all queries and keys, forward or backward.

    attention_mask  the keys that a query attends to: a function of positions and segments; checks the mask arguments
                    of `jp.attention`
    kernel          table of the pairs (block of queries, block of keys) that a mask does not exclude, and one scan over
                    it, forward and backward
    fused           cuDNN's kernel as two calls, with its float32 statistics, for attention over a part of the keys
    attention       attention on one device, with its own backward pass
    lookup          an embedding table sharded by columns

A ring over devices (`parallel/techniques/ring_attention/ring.py`) scans the same tables while keys arrive and leave.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r heads that share one of those,
k head_dim; n blocks, q queries of a block, c keys of a block.
"""
