"""Attention over sequence shards: keys rotate around a ring, devices exchange heads for tokens, or both.

    ring                    numbers of devices that form a ring and that exchange heads; all_to_all of heads (Ulysses);
                            keys and values rotate; in the backward pass, their gradients rotate with them. Each device
                            has an early and a late chunk ("zigzag"), so that all do the same work in causal attention
    block_attention         attention to the rotating keys, block by block in plain JAX, by tables of the block pairs
                            of each ring step; and the same in calls of cuDNN's fused kernel
    choice                  chooses between these two, and the axes that split the call; refuses unsupported shapes;
                            checks the kernel on the device before its first use
    attention               all of this as one function with one backward pass

    P devices = ring x ulysses      sends each layer, forward and backward
    ring        P x 1               P - 1 hops of K and V;  the same, P - 1 of their gradients in float32, one home
    ulysses     1 x P               all_to_all of q, k, v, out;  the same four of their gradients
    both        P/U x U             the all_to_alls over U devices, the hops over P/U

A batch has contiguous sequence shards, so that positions in a model are unaffected. With `causal` a ring reorders them
to zigzag at the entry and exit of attention: half shards of q, k, v and the output, by two permutes each, and likewise
of their gradients.
"""
