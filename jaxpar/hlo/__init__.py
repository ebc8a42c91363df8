"""Reads compiled programs: the text of XLA becomes a value, and every instruction is counted and explained.

    text             computations of instructions
    replica_groups   which devices take part in a collective, along which mesh axes
    trip_counts      how often each instruction runs in a step
    provenance       where a value comes from
    attribution      to which parameter, or line of the user's, bytes belong
    bytes_accessed   what a kernel reads and writes
    flop             FLOP of matmuls, as compiled
    traced_flop      FLOP of matmuls, as traced
    matmuls          reads of a text what leads to its matmuls alone
    own_share        what a device computes beyond its share, and the lines that ask for it
    branches         refuses collectives that devices in different branches would wait for

Nouns: a module, a computation, an `Op`, a replica group, a cause. Knows no layout and no job: any compiled JAX
program can be read.

To read a new form of XLA's text: its pattern beside the others of its file (`text` for instructions, `replica_groups`
for groups), and the text itself under `tests/hlo`. To recognise one more kind of value: a clue in `attribution.of`.
"""
