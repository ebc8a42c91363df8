"""The parameters that a step computes with, and those that it does not train.

gathering     whole over fsdp once per step, where ZeRO's stages 1 and 2 keep shards of them between steps
frozen        paths whose gradients nobody reads
accumulators  sums of gradients, in float32 or more
overwritten   state that is no parameter and whose new value is its gradient, such as the scales of fp8 matmuls
"""
