"""Analyses and rewrites of jaxprs by dataflow: each takes a jaxpr or a function and returns one with equal results.

    split, split_backward             a backward pass in two halves with the fewest residuals
    lean_scan, in_place_scan          scans over layers that save the fewest bytes, or write their results in place
    casts                             parameters of layers are cast before their scan
    stack_layouts                     stacks between a forward and a backward scan are not copied
    gradient_sums                     finds sums of layers' gradients over devices; `hoist_gradient_sums` takes them
                                      once, after the scan that computes the terms, and `whole_gradient_sums` after
                                      the loop that reads a weight in each iteration
    shorter_scan                      scans over all layers run with those of one stage
    lookups                           lookups in sharded tables; bfloat16 for matmuls with promoted operands
    dataflow                          dependencies between equations, and dead code, which the other modules use

Terms: a jaxpr, an equation, a variable, residuals (values that the forward pass saves for the backward pass).

To add a rewrite: a module with a function of a closed jaxpr, and a test that its results equal those of the original.
"""
