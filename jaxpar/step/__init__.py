"""One training step: state, gradients, precision and the update, as one compiled program.

    shard_batch  places a global batch on the devices of a layout
    compiler     traces, checks and compiles the programs of a step
    gradients    the protocol of gradients, and the update from them
    gradient_kinds  chooses the kind of gradients for a layout
    unpipelined  gradients of an unpipelined step: every device has all layers
    per_replica/ replicas that compute separately until an exchange synchronizes them
    pipelined/   gradients of a step whose layers are spread over `pipe`
    frozen_parameters  gathered and frozen parameters
    overwritten_state  state whose new value is its gradient, such as the scales of fp8 matmuls; dtypes of gradient sums
    block_inputs layer inputs in host memory: remat = "offload"
    sampling     generates tokens after prompts, with a KV cache
    head/        the next-token loss in chunks, without materializing all logits
    checks/      checks before a step runs
    stochastic_loss   gradients of a loss that takes a random key
    gradient_norm  the global gradient norm, with one sum over devices
    evaluation_loss  additional evaluation metrics
    step         the step: its jitted update, which may skip values that are not finite, and its evaluation
    model        the user's own Flax model with the parameters of a state: `jp.model`
    state        parameters, optimizer, model and exchange state, initialized sharded

Terms: `Step`, `State`, `Numerics` (precision, remat, accumulation), sums and counts of a loss.
"""
