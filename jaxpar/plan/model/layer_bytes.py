"""Parameters and residuals of a transformer on a device.

Of a layer, [tokens, dim] being 1 (Korthikanti et al. 2022, arXiv:2205.05198, equations 1 to 6, for any widths):

    stream        10: 2 norm inputs, the inputs of two matmuls, 2 masks, or the bytes of the software model; sharded
                  only with sequence parallelism
    inner         24 for q, k, v, attention's result, 2 or 3 times hidden; sharded by tensor
    scores        5 heads seq / dim: softmax, mask, matmul, or the bytes of the software model; sharded by tensor; none
                  with a fused kernel

A pipeline stage of jaxpar saves the fewest bytes from which elementwise ops recompute the rest: two norm inputs, q, k,
v, attention's result, and the results of the one or two matmuls before the feed-forward's last; without a fused kernel
also the scores of the first matmul (`jaxpar.jaxprs.lean_scan`), for split sequences the softmax in 16 bits.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxpar.models.settings.computing import CHUNK, LARGEST
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.shape import Shape, count_parameters

SCORE = 4  # bytes of an attention score, q k, in XLA's own attention: float32
SHARE = 2  # bytes of an attention weight, softmax(q k), in XLA's own attention: 16 bits


def stage_parameters(shape: Shape, candidate: Candidate, stage: Literal["first", "last"], *, spmd: bool = False) -> Any:
    """Returns the parameters on a device of a stage, before fsdp shards them.

    The tensor axis splits matrices, and biases of matrices that it splits by outputs; not norms, nor other biases. The
    first stage has the embedding; the last the head, and the tied embedding. With `spmd` all stages have both
    of them, or an equal share of their vocabulary if `head` is spread.
    """
    blocks = block_parameters(shape, candidate)
    has_both = np.equal(candidate.pipe, 1) | spmd
    table = shape.vocab * shape.dim / candidate.tensor / np.where(spmd, head_shards(candidate), 1)
    position_parameters = shape.learned * shape.seq * shape.dim
    norm = (1 + shape.biases) * shape.dim
    if stage == "first":
        return blocks + table + position_parameters + np.where(has_both, norm + (not shape.tied) * table, 0)
    return blocks + table + norm + np.where(has_both, (not shape.tied) * table + position_parameters, 0)


def head_shards(candidate: Candidate) -> Any:
    """Returns the number of stages that share the embedding and the head."""
    return np.where(np.asarray(candidate.head) == "spread", candidate.pipe, 1)


def device_layer_parameters(shape: Shape, tensor: Any) -> Any:
    """Returns the parameters of a block on one of `tensor` devices; norms and biases of width `dim` are on each."""
    replicated = 2 * shape.dim * (1 + 2 * shape.biases)
    return (count_parameters(shape).layer - replicated) / tensor + replicated


def block_parameters(shape: Shape, candidate: Candidate) -> Any:
    """Returns the parameters of the layers on a device of a stage, before fsdp shards them."""
    return candidate.chunks * candidate.layers(shape.layers) * device_layer_parameters(shape, candidate.tensor)


def spare_parameters(shape: Shape, candidate: Candidate) -> Any:
    """Returns the parameters of the fullest stage beyond an equal share of the layers."""
    return block_parameters(shape, candidate) - shape.layers / candidate.pipe * device_layer_parameters(
        shape, candidate.tensor
    )


def layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the bytes of a layer's residuals for one microbatch under the candidate's remat, and of its backward."""
    residuals, working = software.cost(lambda variant: _layer_bytes(shape, candidate, variant), candidate)
    rings = ring_attention.uses_ring(candidate)
    if not rings.any():
        return residuals, working
    variant = replace(
        software.split_sequences or software, scores=(0.0, 0.0), saved_scores=(0.0, 0.0), regather_context=False
    )
    ring = _layer_bytes(shape, replace(candidate, context_by="gather"), variant)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    # the ring's arrays replace gathered keys and values, and q, k and v in their layout outside of the ring
    gathers = 2 * tokens * (shape.q_dim + 2 * shape.kv_dim * candidate.context) / candidate.tensor
    extra, backward = (
        ring_attention.residual_bytes(shape, candidate) - gathers,
        ring_attention.backward_bytes(shape, candidate, software),
    )
    saves = np.equal(candidate.remat, "none")
    return np.where(rings, ring[0] + saves * extra, residuals), np.where(rings, ring[1] + extra + backward, working)


def stash_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns the bytes per layer and microbatch that a split backward saves between its ops B and W.

    W computes gradients of weights, so it needs the input of each matmul, and of each norm's scale, and the gradient of
    its output. Remat changes nothing, as B has recomputed what remat dropped. The arrays as wide as the model are the
    float32 arrays of two norms, and seven in 16 bits: gradients of two norms' results, and inputs or gradients of
    matmuls.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    stream = tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    qkv, result = shape.q_dim + 2 * shape.kv_dim, shape.q_dim
    # a recomputed gate stashes both factors instead of their product
    extra_factor = shape.gated * np.not_equal(candidate.remat, "none")
    inner = 2 * tokens * (qkv + result + (2 + shape.gated + extra_factor) * shape.width) / candidate.tensor
    return inner + 22 * stream


def host_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns the bytes in host memory during a step: with remat offload, the inputs of all layers of a microbatch."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    stream = tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    offloaded = np.equal(candidate.remat, "offload")
    return np.where(offloaded, 2 * stream * candidate.layers(shape.layers), 0.0)


def logit_chunks(
    tokens: np.ndarray | float, vocab: np.ndarray | float, software: SoftwareModel, *, chunked_head: bool = True
) -> Any:
    """Returns the number of chunks in which the loss computes the logits of a device's tokens; 1 if not chunked.

    As `Logits` of `jaxpar.models.settings.computing`, except for its search for equal chunks. Only jaxpar's program has
    chunks, and only of a head that is a matrix alone (`Shape.chunked_head`).
    """
    size = 4.0 * tokens * vocab
    return np.where(software.spmd & chunked_head & np.greater(size, LARGEST), np.ceil(size / CHUNK), 1.0)


def updates_in_place(candidate: Candidate, software: SoftwareModel) -> Any:
    """Whether a stage updates its buffers in place: if each tick has one kind of op."""
    return software.spmd & np.greater(candidate.pipe, 1) & candidate.schedule_traits.phased


def _lean(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the residual bytes of a stage's layer for one microbatch if only elementwise ops are recomputed."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    rows = tokens / np.where(candidate.sequence, candidate.tensor, 1)
    width = 2 * shape.q_dim + 2 * shape.kv_dim + (1 + shape.gated) * shape.width
    # keys and values of the other devices' tokens, and all of them once more in the layout of the backward matmuls
    gathered = 2 * shape.kv_dim * (candidate.context - 1 + np.greater(candidate.context, 1) * candidate.context)
    # float32: a norm's mean square per token, a softmax's sum per token and head
    inner = 2 * (width + gathered) + 4 * shape.heads
    scores = min(software.saved_scores[0], SCORE) * tokens * shape.heads * shape.seq
    masks = 2 * software.dropout * rows * shape.dim
    return 2 * rows * (2 * shape.dim + 4) + masks + (tokens * inner + scores) / candidate.tensor


def _layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """`layer_bytes` with the attention of one software model for all layouts."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    tensor = candidate.tensor
    stream = tokens * shape.dim / np.where(candidate.sequence, tensor, 1)
    qkv = 2 * tokens * (shape.q_dim + 2 * shape.kv_dim) / tensor
    result = 2 * tokens * shape.q_dim / tensor
    hidden = 2 * tokens * shape.width / tensor
    score = tokens * shape.heads * shape.seq / tensor
    scores = software.saved_scores[0] * score
    rows, keys = candidate.microbatch, (shape.kv_heads or shape.heads) / tensor
    kept_twice, worked_twice = (
        software.extra_score_copies * np.greater(*pair) for pair in ((rows * keys, 1), (rows, keys))
    )
    inner = qkv + result + (2 + shape.gated) * hidden
    # keys and values of the other devices' tokens
    gathered = 4 * tokens * shape.kv_dim / tensor * (candidate.context - 1)
    all_residuals = (software.residual + 2 * software.dropout) * stream + inner + gathered + scores
    working = all_residuals + worked_twice / 4 * scores
    all_residuals = all_residuals - software.regather_context * gathered
    dots = np.where(software.spmd, 4, 6) * stream + qkv + (1 + shape.gated) * hidden
    # a fused kernel's result is not that of a matmul, so jaxpar's remat recomputes it
    product = result * (not software.spmd or software.saved_scores[0] > 0)
    # of split sequences a stage's slots hold it twice: also in the layout of the backward matmuls
    product = product * (1 + software.spmd * (np.greater(candidate.pipe, 1) & np.greater(candidate.context, 1)))
    stage = software.spmd & np.greater(candidate.pipe, 1)
    lean, split_stage = stage & ~candidate.schedule_traits.split, stage & candidate.schedule_traits.split
    # an array that keeps XLA from merging the matmuls of gate and up: `jaxpar.models.custom_gradients.unmerged_input`
    merge_barrier = software.spmd * shape.gated * np.equal(tensor, 1) * ~split_stage * 2 * stream
    # a stage with a split backward saves scores and attention weights; further arrays of scores have no slots
    unread = np.maximum(software.saved_scores[0] - SCORE - SHARE, 0.0) * split_stage * score
    by_policy = {
        "none": np.where(lean, _lean(shape, candidate, software), all_residuals + merge_barrier - unread),
        "all_dots": dots
        + product
        + np.equal(candidate.context, 1) * software.saved_scores[1] * (1 + kept_twice * stage) * score,
        "dots": dots,
        "selective": all_residuals - scores,
        "op": 4 * stream + result + (qkv + (1 + shape.gated) * hidden) / 2,
        "full": 2 * stream,
        "offload": 2 * stream / candidate.layers(shape.layers),  # the input of one layer at a time
    }
    remat = np.asarray(candidate.remat)
    return np.select([remat == name for name in by_policy], list(by_policy.values())), working
