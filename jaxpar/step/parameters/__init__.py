"""Gathered and frozen parameters, and gradients that are not of parameters.

gathering     gathers parameters over fsdp once per step, in ZeRO stages 1 and 2
frozen        finds parameters whose gradients the optimizer does not read
accumulators  sums gradients in float32 or wider
overwritten   model state whose new value is its gradient, such as the scales of fp8 matmuls
"""
