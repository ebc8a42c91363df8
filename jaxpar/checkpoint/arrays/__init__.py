"""The arrays of a checkpoint: one file per process, of blocks that are hashed while they are in memory.

    params/w, fsdp 2          process 0 writes arrays/00000       process 1 writes arrays/00001
    rows 0..31, rows 32..63   rows 0..15, rows 16..31, ...        rows 32..47, rows 48..63, ...

A block is a box of an array, of up to 16 MiB, in C order and uncompressed. It is hashed between the copy from the
device and the write, and again between the read and the copy to the device: no byte is read twice to be checked. The
sharding alone assigns blocks to writing processes, without communication; replicas of an array share its blocks.
A process that restores reads the blocks that overlap with its shards, under whichever layout they were written.

`blocks` cuts and checks (without JAX), `save` writes, `load` reads. To add a storage format: a folder like this one, a
new format number in `checkpoint/manifest.py`, and its reader in `checkpoint/reading.py`.
"""
