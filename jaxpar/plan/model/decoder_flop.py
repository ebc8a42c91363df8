"""FLOP of a decoder: 2 per multiplication of its matmuls; backward is twice forward."""

from jaxpar.plan.model.shape import Shape


def layer_flop(shape: Shape) -> int:
    """Returns the forward FLOP per token of a block's matmuls with weights: 2 per weight."""
    return 2 * sum(inputs * outputs for inputs, outputs in shape.matrices)


def attention_flop(shape: Shape) -> int:
    """Returns the forward FLOP per token of a block's two attention matmuls over a whole row: 4 seq heads head_dim."""
    return 4 * shape.seq * shape.q_dim


def step_flop(shape: Shape, rows: int) -> int:
    """Returns the FLOP of a step over this many rows, without recomputation: backward is twice forward.

    For a frozen weight backward equals forward: 4 FLOP per parameter and token, not 6.

    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix. Masked scores count.
    """
    weights = shape.layers * layer_flop(shape) + 2 * shape.dim * shape.vocab
    return round(rows * shape.seq * ((2 + shape.trained) * weights + 3 * shape.layers * attention_flop(shape)))


def masked_flop(shape: Shape, rows: int) -> int:
    """Returns the FLOP of a step that a causal mask drops: half of attention's matmuls."""
    return round(rows * shape.seq * 3 * shape.layers * attention_flop(shape) / 2) if shape.causal else 0
