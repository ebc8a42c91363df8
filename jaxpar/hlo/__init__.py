"""Reads compiled programs: parses XLA's text, and counts and explains every instruction.

    text             computations of instructions
    replica_groups   the devices that take part in a collective, and their mesh axes
    trip_counts      executions of each instruction in a step
    provenance       the origin of a value
    attribution      the parameter, or line of the user's code, to which bytes belong
    bytes_accessed   bytes that a kernel reads and writes
    flop             FLOP of matmuls in the compiled and in the traced program
    flop_share       matmuls that a device computes beyond its share, and the lines that cause them
    branches         refuses collectives in branches that different devices may take: they would wait for each other

Terms: a module, a computation, an `Op`, a replica group, a cause. This code reads any compiled JAX program, and knows
neither layouts nor jobs.

To read a new form of XLA's text: its pattern next to the others of its file (`text` for instructions, `replica_groups`
for groups), and the text itself under `tests/hlo`. To recognise one more kind of value: a clue in
`attribution.ArrayCauses.find_cause`.
"""
