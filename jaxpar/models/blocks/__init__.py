"""Attention block by block: no array with a row of scores for every query and key, forward or backward.

    pairs     which blocks of queries meet which blocks of keys, as a table
    rule      which keys a query sees: a function of positions and segments
    cutting   sequences cut in chunks and blocks, and joined again
    kernel    one walk over a table of pairs, forward and backward
    fused     cuDNN's kernel as two calls, with its float32 statistics; a part of attention where pieces travel
    trial     a trial of that kernel on the device, before its first use
    attention attention on one device, with a backward pass of its own
    whole_scores scores that are there all at once, where keys are gathered
    documents documents that share a row, on their way through the layers

A ring over devices (`parallel/techniques/exchanged/ring.py`) walks the same tables, with keys that come and go.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r heads that share one of those,
k head_dim; n blocks, q queries of a block, c keys of a block.
"""
