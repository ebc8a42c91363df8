"""Attention over pieces of sequences that travel: keys around a ring, heads for tokens, or both.

    ways       how many devices make a ring, how many exchange heads, and what they are called
    heads      all_to_all: a device gives most heads away and gets more tokens (Ulysses)
    zigzag     each device takes an early and a late chunk, so that causal attention is the same work for all
    walks      which blocks meet in each turn of a ring, as tables
    ring       keys and values go around; backward, their gradients go with them
    in_blocks  how queries meet keys that have come: block by block in plain JAX
    by_kernel  the same, in calls of cuDNN's fused kernel
    choice     which of the two it is, and how the call is cut for it
    attention  the three as one function with one backward pass, and what it refuses

    P devices = ring x ulysses      sends each layer, forward and backward
    ring        P x 1               P - 1 hops of K and V;  the same, P - 1 of their gradients in float32, one home
    ulysses     1 x P               all_to_all of q, k, v, out;  the same four of their gradients
    both        P/U x U             the all_to_alls over U devices, the hops over P/U

A batch comes in pieces that are contiguous, and any model keeps its positions. Under `causal` a ring permutes them at
the door of attention: half pieces of q, k, v and of the output, by two permutes each, and of their gradients backward.
"""
