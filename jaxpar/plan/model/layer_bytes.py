"""Bytes of a transformer on a device: its parameters, and what a layer keeps for the backward pass.

Of a layer, [tokens, dim] being 1 (Korthikanti et al. 2022, arXiv:2205.05198, equations 1 to 6, for any widths):

    stream        10: 2 norm inputs, the inputs of two matmuls, 2 masks, or as the software keeps it; sharded with
                  sequence parallelism only
    inner         24 for q, k, v, attention's result, 2 or 3 times hidden; sharded by tensor
    scores        5 heads seq / dim: softmax, mask, matmul, or as the software keeps them; sharded by tensor; none in
                  a fused kernel

A stage of jaxpar's keeps the fewest bytes from which elementwise ops make the rest again: two inputs of norms, q, k, v,
attention's result, the results of the one or two matmuls before the feed-forward's last; unfused, scores as the first
matmul leaves them (`jaxpar.pipeline.jaxprs.fewest_kept`), and of split sequences shares in 16 bits.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxpar.models.settings.logits import CHUNK, LARGEST
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.shape import Shape

SCORE = 4  # bytes: XLA's own attention has its scores in float32
SHARE = 2  # bytes: and its shares, softmax(q k), in 16 bits


def stage_parameters(
    shape: Shape, candidate: Candidate, stage: Literal["first", "last"], *, everywhere: bool = False
) -> Any:
    """Returns the parameters on a device of a stage, before fsdp shards them.

    The tensor axis cuts matrices, and the biases of those it cuts by outputs; not norms, nor what is added to the
    stream. The first stage has the embedding; the last, the head, and the embedding where that is tied to it; or all
    stages have both, `everywhere`: whole, or their shares of the vocabulary where they are spread.
    """
    blocks = block_parameters(shape, candidate)
    one = np.equal(candidate.pipe, 1) | everywhere
    table = shape.vocab * shape.dim / candidate.tensor / np.where(everywhere, candidate.sharing, 1)
    places = shape.learned * shape.seq * shape.dim
    norm = (1 + shape.biases) * shape.dim
    if stage == "first":
        return blocks + table + places + np.where(one, norm + (not shape.tied) * table, 0)
    return blocks + table + norm + np.where(one, (not shape.tied) * table + places, 0)


def block_parameters(shape: Shape, candidate: Candidate) -> Any:
    """Returns the parameters of the layers on a device of a stage, before fsdp shards them."""
    return candidate.chunks * candidate.layers(shape.layers) * shape.cut_layer(candidate.tensor)


def spare_parameters(shape: Shape, candidate: Candidate) -> Any:
    """Returns the parameters that the fullest stage has beyond its share: those of the layers that others have less."""
    return block_parameters(shape, candidate) - shape.layers / candidate.pipe * shape.cut_layer(candidate.tensor)


def layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns what a layer keeps of one microbatch with the candidate's remat, and what its backward works with."""
    kept, working = software.cost(lambda own: _layer_bytes(shape, candidate, own), candidate)
    far = exchanged.travels(candidate)
    if not far.any():
        return kept, working
    own = replace(software.pieces or software, scores=(0.0, 0.0), kept=(0.0, 0.0), context_again=False)
    there = _layer_bytes(shape, replace(candidate, context_by="gather"), own)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    # in place of gathered keys and values, and of q, k and v as they were before they set out
    less = 2 * tokens * (shape.dim + 2 * shape.kv_dim * candidate.context) / candidate.tensor
    more, again = exchanged.kept_bytes(shape, candidate) - less, exchanged.worked_bytes(shape, candidate, software)
    keeps = np.equal(candidate.remat, "none")
    return np.where(far, there[0] + keeps * more, kept), np.where(far, there[1] + more + again, working)


def stash_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns what the backward of a layer leaves for its weights' half, of one microbatch, where a table splits them.

    Of each matmul, and of the scale of each norm, its input and the gradient of its output, whatever the remat: what
    that drops is computed again by then. As wide as the stream are what two norms have in float32, and seven arrays
    in 16 bits: gradients of two norms' results, and inputs or gradients of matmuls.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    stream = tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    qkv, result = shape.dim + 2 * shape.kv_dim, shape.dim
    # both factors of a gate that is computed again, where else their product is kept
    again = shape.gated * np.not_equal(candidate.remat, "none")
    inner = 2 * tokens * (qkv + result + (2 + shape.gated + again) * shape.width) / candidate.tensor
    return inner + 22 * stream


def host_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns what is in host memory while a step runs: with remat offload the inputs of all layers of a microbatch."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    stream = tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    away = np.equal(candidate.remat, "offload")
    return np.where(away, 2 * stream * candidate.layers(shape.layers), 0.0)


def logit_chunks(tokens: Any, vocab: Any, software: SoftwareModel) -> Any:
    """Returns in how many chunks a loss makes the logits of a device's tokens; 1 where it makes them whole.

    As `jaxpar.models.settings.logits.Logits` has it, but for the search for equal chunks. Others' programs have none.
    """
    size = 4.0 * tokens * vocab
    return np.where(software.everywhere & np.greater(size, LARGEST), np.ceil(size / CHUNK), 1.0)


def in_place(candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns whether a stage reads and writes its buffers where they are: in ticks of one kind of op."""
    return software.everywhere & np.greater(candidate.pipe, 1) & candidate.phased


def _lean(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns what a layer of a stage keeps of one microbatch where nothing but elementwise ops is computed again."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    rows = tokens / np.where(candidate.sequence, candidate.tensor, 1)
    width = 2 * shape.dim + 2 * shape.kv_dim + (1 + shape.gated) * shape.width
    # keys and values of the others' tokens, and all of them once more, as matmuls going backward read them
    gathered = 2 * shape.kv_dim * (candidate.context - 1 + np.greater(candidate.context, 1) * candidate.context)
    # float32: the mean square of a norm for each token, the sum of a softmax for each token and head
    inner = 2 * (width + gathered) + 4 * shape.heads
    scores = min(software.kept[0], SCORE) * tokens * shape.heads * shape.seq
    masks = 2 * software.dropout * rows * shape.dim
    return 2 * rows * (2 * shape.dim + 4) + masks + (tokens * inner + scores) / candidate.tensor


def _layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the same, for layouts that all have the attention of one software model."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    tensor = candidate.tensor
    stream = tokens * shape.dim / np.where(candidate.sequence, tensor, 1)
    qkv = 2 * tokens * (shape.dim + 2 * shape.kv_dim) / tensor
    result = 2 * tokens * shape.dim / tensor
    hidden = 2 * tokens * shape.width / tensor
    score = tokens * shape.heads * shape.seq / tensor
    scores = software.kept[0] * score
    rows, keys = candidate.microbatch, (shape.kv_heads or shape.heads) / tensor
    kept_twice, worked_twice = (software.relaid * np.greater(*each) for each in ((rows * keys, 1), (rows, keys)))
    inner = qkv + result + (2 + shape.gated) * hidden
    others = 4 * tokens * shape.kv_dim / tensor * (candidate.context - 1)  # keys and values of the others' tokens
    everything = (software.residual + 2 * software.dropout) * stream + inner + others + scores
    working = everything + worked_twice / 4 * scores
    everything = everything - software.context_again * others
    dots = np.where(software.everywhere, 4, 6) * stream + qkv + (1 + shape.gated) * hidden
    # a kernel's result is none of a matmul, so that jaxpar's remat makes it again
    product = result * (not software.everywhere or software.kept[0] > 0)
    # nor do a stage's slots have the products of split sequences as matmuls going backward read them
    product = product * (1 + software.everywhere * (np.greater(candidate.pipe, 1) & np.greater(candidate.context, 1)))
    stage = software.everywhere & np.greater(candidate.pipe, 1)
    lean, split = stage & ~candidate.split, stage & candidate.split
    # what keeps XLA from making one matmul of gate and up: see `jaxpar.models.own_backward.another`
    another = software.everywhere * shape.gated * np.equal(tensor, 1) * ~split * 2 * stream
    # a stage that splits its backward keeps scores and shares; those that nothing else reads are no slots of it
    unread = np.maximum(software.kept[0] - SCORE - SHARE, 0.0) * split * score
    kept = {
        "none": np.where(lean, _lean(shape, candidate, software), everything + another - unread),
        "all_dots": dots + product + np.equal(candidate.context, 1) * software.kept[1] * (1 + kept_twice) * score,
        "dots": dots,
        "selective": everything - scores,
        "op": 4 * stream + result + (qkv + (1 + shape.gated) * hidden) / 2,
        "full": 2 * stream,
        "offload": 2 * stream / candidate.layers(shape.layers),  # that of the layer whose turn it is
    }
    remat = np.asarray(candidate.remat)
    return np.select([remat == name for name in kept], list(kept.values())), working
