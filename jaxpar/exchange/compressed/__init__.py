"""Compressed gradients: replicas stay equal, and send their gradients in fewer bytes.

    base       the base class of codes: blocks, error feedback; packs small integers in bytes
    two_phases sends codes by an all-to-all and an all-gather
    selective  selects the parameters whose gradients are compressed
    ternary    two bits per element, rounded at random; and `sign`, one bit per element
    qsgd       8 or 4 bits, at random    bfloat16   bfloat16, summed in float32
    topk       the largest elements      randomk    elements drawn at random, sent with the seed
    sparse     the largest elements, and their exact sum

A code encodes a row of elements block by block, and each receiver decodes it: the wire carries the code's dtype. Each
replica receives its piece of every gradient from all replicas, takes the mean over replicas, and sends a code of the
mean to all (`two_phases`).

To add one: a file with a frozen dataclass that is a `Compressed`, with `encode` and `decode`, and a row of
`exchange.table`.
"""
