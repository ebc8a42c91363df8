"""Finds the shards of parameters and activations that a step should have over one mesh axis, or over two.

program.py      the jaxpr of loss and gradients ─► arrays, whose dims are joined between operations, and operations
operations.py   matmuls, convolutions, lookups: loops over dims of their operands and results
classes.py      equal layers ─► one layer with a count; equal dims, arrays and operations have one decision
formulation.py  the columns and rows of an integer program; cut_columns.py those of the cuts, strategies.py the ways to
                split an operation
optimize.py     which dims to cut: an integer program, solved exactly (HiGHS), with its lower bound
user_input.py   checks the arguments; where the user names dims too, the user's names are used
names.py        the solution as names of dims and rules that a person can read, and paste into a declaration
"""
