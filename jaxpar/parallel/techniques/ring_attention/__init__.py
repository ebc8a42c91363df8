"""Attention over sequence shards that travel: keys around a ring, heads for tokens, or both.

    ways       the numbers of devices that form a ring and that exchange heads
    heads      all_to_all: a device gives most heads away and gets more tokens (Ulysses)
    zigzag     each device takes an early and a late chunk, so that causal attention is the same work for all
    walks      tables of the block pairs that meet in each turn of a ring
    ring       keys and values rotate; in the backward pass, their gradients rotate with them
    in_blocks  queries meet the rotating keys block by block in plain JAX
    by_kernel  the same, in calls of cuDNN's fused kernel
    choice     chooses between these two, and the axes that split the call
    attention  all of it as one function with one backward pass; `checks` has the shapes that it refuses

    P devices = ring x ulysses      sends each layer, forward and backward
    ring        P x 1               P - 1 hops of K and V;  the same, P - 1 of their gradients in float32, one home
    ulysses     1 x P               all_to_all of q, k, v, out;  the same four of their gradients
    both        P/U x U             the all_to_alls over U devices, the hops over P/U

A batch comes in contiguous shards, and any model keeps its positions. Under `causal` a ring permutes them at the entry
and exit of attention: half shards of q, k, v and the output, by two permutes each, and likewise of their gradients.
"""
