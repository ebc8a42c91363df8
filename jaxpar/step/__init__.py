"""One training step: state, gradients, precision and the update, as one compiled program.

    batch/       a global batch on the devices of a layout
    gradients    the protocol of gradients, and the update that follows from them
    kinds        which kind of gradients a layout has
    whole        gradients of a step whose layers are all on every device
    apart/       what replicas compute each for itself, until they agree by an exchange
    pipelined/   gradients of a step whose layers are spread over `pipe`
    parameters/  those that a step computes with, dtypes of their gradients, and other state that has gradients
    block_inputs inputs of layers in host memory: remat = "offload"
    sampling/    tokens after prompts, with a cache of keys and values
    head/        the loss of the next token without all logits at once
    checks/      what a step looks at before it runs
    keyed/       gradients of a loss that wants a random key
    norm/        the norm of all gradients, by one sum over devices
    measures/    what evaluations say beside the loss
    guard        a step that changes nothing where its numbers are not finite
    state        parameters, optimizer and model state, and that of the exchange, born sharded

Nouns: `Step`, `State`, `Numerics` (how it computes), sums and counts of a loss.
"""
