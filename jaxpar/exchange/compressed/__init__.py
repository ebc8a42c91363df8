"""Compressed gradients: replicas stay equal, and what they send of their gradients is small.

    base       what codes of elements have in common, and what they lose; `two_phases`: how they travel
    chosen     which parameters are compressed
    sign       one bit an element        ternary    two bits, at random
    qsgd       8 or 4 bits, at random    bfloat16   bfloat16, summed in float32
    topk       the largest elements      randomk    elements drawn at random, with the seed
    sparse     the largest elements, and all of their sum
    codes      small numbers packed in bytes

A code is made of a row of elements, block by block, and made elements again by everyone who gets it: what travels has
the dtype of the code. Each replica is sent its piece of all gradients, takes their mean, and sends a code of that to
all (`two_phases`).

To add one: a file with a frozen dataclass that is a `Compressed`, with `encode` and `decode`, and a row of
`exchange.table`.
"""
