"""Compressed gradients: replicas stay equal, and send their gradients in fewer bytes.

    base       the base class of codes: the parameters whose gradients are compressed, blocks, error feedback
    two_phases sends codes by an all-to-all and an all-gather
    quantization    every element in fewer bits: bfloat16, 8 or 4 bits, two bits, or its sign
    sparsification  some elements of each block: the largest ones, or random ones

A code encodes a row of elements block by block, and each receiver decodes it: the wire carries the code's dtype. Each
replica receives its piece of every gradient from all replicas, takes the mean over replicas, and sends a code of the
mean to all (`two_phases`).

To add one: a file with a frozen dataclass that is a `Compressed`, with `encode` and `decode`, and a row of
`exchange.table`.
"""
