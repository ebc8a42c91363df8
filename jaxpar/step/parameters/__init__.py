"""Gathered and frozen parameters, and model state whose new value is its gradient.

frozen        finds parameters whose gradients the optimizer does not read; gathers parameters once per step
overwritten   model state whose new value is its gradient, such as the scales of fp8 matmuls; accumulator dtypes
"""
