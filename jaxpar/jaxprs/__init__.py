"""Analyses and rewrites of jaxprs by dataflow: each takes a jaxpr or a function and returns one with equal results.

    split, split_backward, min_cut    a backward pass in two halves with the fewest residuals
    lean_scan, in_place_scan          scans over layers that save less, or write their results in place
    gradient_sums                     sums over replicas that are taken once, after the scan that makes their terms
    lookups, mixed_matmuls            lookups in sharded tables, and matmuls in the dtypes of the precision
    dataflow, dead_code               the walks that the others share

Nouns: a jaxpr, an equation, a variable, residuals (values that the forward pass saves for the backward pass).

To add a rewrite: a module with a function of a closed jaxpr, and a test that its results equal those of the original.
"""
