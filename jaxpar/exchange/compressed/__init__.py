"""Compressed gradients: replicas stay equal, and send few bytes of their gradients.

    base       what all codes share: blocks, error feedback; `two_phases`: how codes are sent
    chosen     which parameters are compressed
    sign       one bit an element        ternary    two bits, at random
    qsgd       8 or 4 bits, at random    bfloat16   bfloat16, summed in float32
    topk       the largest elements      randomk    elements drawn at random, with the seed
    sparse     the largest elements, and all of their sum
    codes      small numbers packed in bytes

A code encodes a row of elements block by block, and each receiver decodes it: the wire carries the code's dtype. Each
replica receives its piece of all gradients, takes their mean, and sends a code of that mean to all (`two_phases`).

To add one: a file with a frozen dataclass that is a `Compressed`, with `encode` and `decode`, and a row of
`exchange.table`.
"""
