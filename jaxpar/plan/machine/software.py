"""Software models: the kernels of a training program, the memory traffic of its elementwise ops, and its overlap.

Bytes are for bfloat16 activations, with dropout if the program has it. Each number counts the reads and writes of the
program's kernels, so it can be checked against their source.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.kernels import CUDNN, FLASH_2, BlockKernels, Kernel, PairCost, RingKernel


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareModel:
    """The kernels, memory traffic and overlap of a program that trains a transformer.

    Attributes:
      attention: "unfused": scores are written to memory; "fused": they are not, and a causal kernel computes half.
      split_sequences: Software model of layouts that split sequences, if different: cuDNN's kernel takes only whole
        sequences.
      ring_kernel: Fused kernel for ring and Ulysses attention; None for blocks of plain JAX, described by `pair_cost`
        and by the `core` of `split_sequences`.
      core: Share of the peak that attention's matmuls reach, forward and backward, if `kernel` does not state it.
      kernel: The fused kernel, with shares of the peak for some chips.
      scores: Memory traffic per score of unfused attention in bytes, forward and backward.
      saved_scores: Bytes per score saved for the backward pass, and the part of them that matmuls produce; 0 for fused
        attention.
      stacked_scores: Bytes per score of the same in `stacking_traffic`, with copies to other layouts, if different.
      working_scores: Bytes per score in a layer's backward if no scores are saved.
      softmax_split: Most keys of a row for which the softmax of unfused attention is one kernel (0: any number); and
        the additional forward traffic per score beyond that.
      scaling_traffic: Additional forward traffic per score if a device has more than one row and more than one kv
        head: scores with one more dim are scaled outside of the softmax's kernel.
      pair_cost: Cost of blockwise attention per pair of blocks.
      extra_score_copies: Extra copies of the attention scores that a pipeline stage saves, because XLA picks different
        layouts in the forward and the backward pass (only if rows x kv_heads per device > 1); plus a quarter of a copy
        during the layer's backward if rows > kv_heads and no scores are saved.
      residual: Bytes per element [tokens, dim] that a layer saves without recomputation.
      stream: Bytes per element [tokens, dim] of norms, dropout and residual adds, forward and backward.
      inner: Bytes per element of the widths that the tensor axis splits: q, k, v and the feed-forward's hidden.
      block_kernels: Numbers of kernels of a block, which matter if they are small; None if the constants are fitted to
        runs of large models, and contain them.
      logits: Bytes per logit of the loss, forward and backward together.
      accumulate: Bytes per parameter and microbatch of gradient accumulation.
      update: Bytes per parameter of the optimizer's step, all reads and writes.
      wire: Bytes per parameter that fsdp gathers, and per gradient that fsdp and data reduce.
      stacking_traffic: Memory traffic per byte of saved activation, for stacking it in the layer scan and slicing it
        out (and the same for pipeline slots); 0 if it is used in place.
      reduce_every_microbatch: Whether gradients are reduced for every microbatch, not their sum once a step.
      layerwise: Whether each layer has its own collectives for its parameters and gradients.
      bucket: Bytes of a gradient bucket; the last bucket fills as the backward pass ends, so nothing hides its
        collective. 0 if each layer has its own collective.
      reduce_whole: Whether ZeRO-1 all-reduces whole gradients over fsdp and data, once a step.
      broadcast_arrays: Arrays of a layer, if ZeRO-1 and 2 assign each whole array to one device of fsdp, which
        broadcasts it after the update; 0 if all devices gather shards.
      exposed_update: Whether that gather or broadcast of updated parameters ends the step and is exposed.
      overlap: Share of fsdp's and data's collectives that computation hides, if there is enough computation.
      hidden_all_reduce: The share for all-reduces of gradients over data; None if it is `overlap`, too.
      interference: Slowdown of computation by hidden collectives of fsdp and data, which share cores and memory with
        it: a share of the time of their bytes inside a node.
      exposed_edge_gathers: Whether each pass begins or ends with an exposed gather: of the first layers in the
        forward pass, of the last layer in the backward pass; with sharded parameters and layerwise collectives.
      tensor_overlap: Hidden share of the tensor axis' collectives of a decoder that can overlap with a matmul.
      context_overlap: Hidden share of the context axis' collectives of a decoder.
      context_shards: Whether devices of the context axis share the training state like devices of fsdp.
      regather_context: Whether the backward pass gathers keys and values again, instead of saving them.
      regather: Whether sequence parallelism saves shards of matmul inputs, and gathers them again in the backward pass.
      dropout: Whether dropout masks are saved.
      host: Seconds of a step in which chips wait for the host: the optimizer's launches, clipping, logging.
      host_stalls: Seconds of a block in which the chip waits for the host, forward and backward; 0 if launches run
        ahead.
      run: "asynchronous": each stage runs its own program; "barrier": all run one program, in lockstep per tick.
      exchange: Exchange of the replicas over data.
      scatter: Whether each tensor rank sends its share of a pipeline message, which is gathered on arrival.
      source: Source of the numbers.
    """

    attention: Literal["unfused", "fused"]
    split_sequences: "SoftwareModel | None" = None
    ring_kernel: RingKernel | None = None
    core: tuple[float, float]
    kernel: Kernel | None = None
    scores: tuple[float, float] = (0.0, 0.0)
    saved_scores: tuple[float, float] = (0.0, 0.0)
    stacked_scores: tuple[float, float] | None = None
    working_scores: float = 0.0
    softmax_split: tuple[int, float] = (0, 0.0)
    scaling_traffic: float = 0.0
    pair_cost: PairCost = field(default_factory=PairCost)
    extra_score_copies: float = 0.0
    residual: float = 8.0
    stream: tuple[float, float]
    inner: tuple[float, float]
    block_kernels: BlockKernels | None = None
    logits: float
    accumulate: float
    update: float
    wire: tuple[float, float] = (2.0, 2.0)
    stacking_traffic: float = 0.0
    reduce_every_microbatch: bool = False
    layerwise: bool = True
    bucket: float = 0.0
    reduce_whole: bool = False
    broadcast_arrays: int = 0
    exposed_update: bool = False
    overlap: float
    hidden_all_reduce: float | None = None
    interference: float = 0.0
    exposed_edge_gathers: bool = False
    tensor_overlap: float = 0.0
    context_overlap: float = 0.0
    context_shards: bool = False
    regather_context: bool = False
    regather: bool = False
    dropout: bool = False
    host: float = 0.0
    host_stalls: tuple[float, float] = (0.0, 0.0)
    run: Literal["asynchronous", "barrier"] = "asynchronous"
    scatter: bool = False
    exchange: Exchange = field(default_factory=AllReduce)
    source: str

    def score(self, keys: int, candidate: Candidate, kv_heads: int) -> tuple[Any, Any]:
        """Returns the memory traffic per score of unfused attention with this many keys, forward and backward."""
        limit, extra = self.softmax_split
        several = np.greater(candidate.microbatch, 1) & np.greater(kv_heads, candidate.tensor)
        return self.scores[0] + extra * bool(limit and keys > limit) + self.scaling_traffic * several, self.scores[1]

    def cost(self, price: Callable[["SoftwareModel"], tuple[Any, ...]], candidate: Candidate) -> tuple[Any, ...]:
        """Evaluates `price` with this model, and with `pieces` for candidates that split sequences."""
        costs = price(self)
        if self.split_sequences is None or not np.any(splits := np.greater(candidate.context, 1)):
            return costs
        return tuple(np.where(splits, *pair) for pair in zip(price(self.split_sequences), costs, strict=True))

    def sharers(self, candidate: Candidate) -> Any:
        """Returns the number of devices that share the state that fsdp shards."""
        shares_context = np.logical_or(self.context_shards, candidate.zero_context) & np.greater(candidate.zero, 0)
        return candidate.fsdp * np.where(shares_context, candidate.context, 1)

    def keeps_gathered(self, candidate: Candidate) -> Any:
        """Whether ZeRO-3 saves gathered parameters for the backward pass, as JAX does with any residual."""
        unpipelined = np.equal(candidate.pipe, 1) & np.greater(self.sharers(candidate), 1) & np.equal(candidate.zero, 3)
        return self.spmd & unpipelined & np.equal(candidate.remat, "none")

    @property
    def spmd(self) -> bool:
        """Whether every stage stores embedding and head, as one program on all devices does."""
        return self.run == "barrier"

    def __post_init__(self):
        check_ranges(
            self,
            "software model",
            {
                key: (0.0, 1e4)
                for key in ("working_scores", "extra_score_copies", "residual", "logits", "accumulate", "update")
            }
            | {"stacking_traffic": (0.0, 1e4)}
            | {key: (0.0, 1.0) for key in ("overlap", "tensor_overlap", "context_overlap")}
            | {"interference": (0.0, 10.0), "host": (0.0, 60.0), "bucket": (0.0, 1e15), "broadcast_arrays": (0, 1e4)},
        )
        pairs = {"core": (1e-3, 1.0)} | dict.fromkeys(
            ("scores", "saved_scores", "stream", "inner", "wire", "host_stalls"), (0.0, 1e4)
        )
        for key, (low, high) in pairs.items():
            pair = getattr(self, key)
            if not (len(pair) == 2 and all(low <= number <= high for number in pair)):
                raise refuse(
                    f"software.{key}={pair}", rule=f"two numbers within {low}..{high}", fix=f"{key}=(0.5, 0.5)"
                )


# fitted on published runs with the constants of hardware.py; `python -m tests.bench.planner --leave-out group` prints
# them
HOST = 0.0445  # seconds of a step in which eager PyTorch's chips wait for the host; half of it when compiled
_OP = 2.14e-4  # seconds of an op with blocking launches: Python, autograd, launch, and the wait for its end
_INTERFERENCE = 0.8
_HIDDEN = 0.73  # share of gathers and scatters that XLA hides in MaxText's loop over layers

MEGATRON_2022 = SoftwareModel(
    attention="unfused",
    core=(0.6, 0.5),  # assumed: matmuls of width dim / heads, with scores written and read at the same time
    # forward: QK^T writes 2, softmax 2 + 2, dropout 2 + 2 + mask 1, PV reads 2
    # backward: dV and dP 2 + 2, dropout 2 + 1 + 2, softmax 2 + 2 + 2, dQ and dK 2 + 2
    scores=(13.0, 19.0),
    saved_scores=(5.0, 2.0),  # softmax 2, mask 1, matmul 2: Korthikanti et al., section 4.1
    # forward: 2 norms of 2 + 2; 2 times bias, dropout and residual of 2 + 2 + 2 + mask 1
    # backward: 2 norms of 2 + 2 + 2, 2 dropouts of 2 + 1 + 2 and 2 for the bias, 2 sums of 2 + 2 + 2
    stream=(22.0, 38.0),
    # forward: bias or gelu 2 + 2; backward: 2 + 2 + 2, and 2 for the bias
    inner=(4.0, 8.0),
    logits=50.0,  # bytes: cast to float32 6, max 4, subtract 8, exp 8, sum 4, divide 8; backward 12
    accumulate=8.0,  # float32 sum, read and written by the matmul that makes the gradient
    update=58.0,  # bytes: unscale 8, norm 4, clip 8, Adam 16 + 12, cast to bfloat16 6, clear 4
    layerwise=False,  # one buffer holds the gradients of all layers: Megatron-LM's DistributedDataParallel
    overlap=0.0,  # its schedule ends with the all-reduce, when no computation is left to hide it
    tensor_overlap=0.5,  # assumed: a collective takes processors and bandwidth from the concurrent matmul
    regather=True,
    dropout=True,
    host=HOST / 2,
    scatter=True,
    source="Korthikanti et al. 2022, arXiv:2205.05198, sections 4 to 6; Narayanan et al. 2021, arXiv:2104.04473, "
    "sections 4.1 and 4.2; elementwise ops counted from the model's equations, overlaps assumed; host as of a compiled "
    "PyTorch",
)

MEGATRON_BLOCKING = replace(
    MEGATRON_2022,
    # forward: 4 matmuls with biases and reductions, 2 of attention with softmax, dropout and transposes, 2 norms,
    # gelu, 2 of bias, dropout and residual; backward each twice
    host_stalls=(20 * _OP, 40 * _OP),
    source="Megatron-DeepSpeed with CUDA_LAUNCH_BLOCKING=1, without which BLOOM hung on 320 A100s: bigscience-workshop/"
    "bigscience, train/tr11-176B-ml/chronicles-prequel.md; that its timings on 384 were taken so is inferred; an op's "
    "time fitted on them; all else as MEGATRON_2022",
)

TORCHTITAN = SoftwareModel(
    attention="fused",
    core=(0.34, 0.30),  # FlashAttention-2 on H100: kernels.py
    kernel=FLASH_2,
    # twice: sum and norm read 2 + 2 and write 2 + 2; backward read 2 + 2 + 2, write 2, and 2 for the norm's weight
    stream=(16.0, 20.0),
    # forward: rotate 2 + 2, or gate 4 + 2 for two; backward: rotate 2 + 2, or gate 6 + 4 for two
    inner=(4.0, 5.0),
    logits=24.0,  # bytes: cast to float32 6, softmax 8; backward 10
    accumulate=0.0,  # one microbatch a step
    update=40.0,  # bytes: norm 4, clip 8, Adam 16 + 12
    wire=(2.0, 4.0),
    overlap=1.0,
    interference=_INTERFERENCE,
    exposed_edge_gathers=True,
    context_shards=True,  # torchtitan/distributed/parallel_dims.py: fully_shard over dp_shard x cp
    host=HOST / 2,
    source="torchtitan's fully_shard (bfloat16 parameters, float32 gradients), elementwise ops as torch.compile "
    "fuses them; all of its collectives but the first run beside computation; interference and host fitted",
)

MAXTEXT = replace(
    TORCHTITAN,
    core=(0.535, 0.45),  # cuDNN on H100: kernels.py
    kernel=CUDNN,
    overlap=_HIDDEN,
    context_shards=False,
    # the last op of a loop over layers; XLA moves no op across iterations unless an option says so
    hidden_all_reduce=0.0,
    interference=0.0,
    host=0.0,
    source="MaxText with cuDNN's fused attention, elementwise ops as XLA fuses them; overlap fitted",
)

_WHOLE = replace(
    MAXTEXT,
    accumulate=12.0,  # the microbatch's gradient written 4, the sum read 4 and written 4
    # replayed programs: three reductions that read 2, and the gradient, which reads 2 and writes 2
    logits=10.0,
    update=32.0,  # norm 4, Adam 16 + 12; clipping is fused with it
    block_kernels=BlockKernels(
        arrays=(9, 12),
        numbers=(6, 12),
        weights=(1, 2),
        around_collectives=1.5,
        cast_bytes=6.0,
        copy_bytes=8.0,
        stacks=13,
        matmuls=(2, 4),
        source="counted in decoders of 4 layers of 2,048 and 24 of 512, compiled by XLA 0.12 for one H100: besides "
        "matmuls 23 to 26 and 40 to 43 kernels with remat dots, 39 and 40 to 42 without recomputation, of which three "
        "to five of scores; in ZeRO-1 over 8 devices 24 and 49",
    ),
    wire=(2.0, 2.0),  # cast before collectives: tests/inspector/test_collectives.py
    residual=8.0,  # two norms' inputs, and their outputs, inputs of matmuls: `models/custom_gradients.py`
    # a scan over layers copies it into one array for all layers and out of it again; a buffer is cleared
    stacking_traffic=5.0,
    # replayed from two layers of an 8B model on 8 H100s, rings at 32,768 tokens in blocks of 128 x 256 to 512 x 512
    pair_cost=PairCost(
        scores=(19.4, 17.0),
        queries=(32.8, 26.4),
        keys=(12.8, 64.0),
        pair=12e-6,
        least=(28e-6, 32e-6),  # 14 and 16 kernels of 2 us: matters with few heads, e.g. if Ulysses exchanges all
    ),
    # without a pipeline; pipelines reduce gradients once, after the loop over ticks
    reduce_every_microbatch=True,
    hidden_all_reduce=None,
    exposed_edge_gathers=False,  # in the replayed programs
    overlap=0.3,  # replayed: 8 to 35 % is hidden in an 8B model on 64 H100s, as XLA 0.12 schedules it
    tensor_overlap=0.5,  # replayed in the same programs
    context_overlap=0.8,  # replayed: half is hidden across two nodes, 75 to 92 % inside one
    run="barrier",
    source="jaxpar on NVIDIA GPUs with cuDNN's fused attention, one program on all stages; elementwise ops as XLA "
    "fuses them; overlap as replayed from compiled programs, not measured",
)

_UNFUSED = replace(
    _WHOLE,
    attention="unfused",
    kernel=None,
    core=(0.6, 0.5),  # assumed, as of Megatron-LM's
    # from the kernels of an 8B model on 64 H100s: forward QK^T writes 4, mask and softmax 4 + 4 + 2, PV reads 2
    # backward: dP 4, softmax 4 + 4 and select 4, half of it concurrent with matmuls
    scores=(16.0, 15.0),
    # of decoders compiled by XLA 0.12: float32 results of matmuls, and attention weights in 16 bits
    saved_scores=(6.0, 4.0),
    stacked_scores=(10.0, 1.0),  # replayed in the same programs
    working_scores=11.0,  # in the same programs
    extra_score_copies=1.0,
    source="jaxpar as XLA compiles it where there is no cuDNN: scores in float32, to memory and back; overlap as "
    "replayed from compiled programs, not measured",
)

_PIECES = replace(
    _UNFUSED,
    # replayed from gathered keys of an 8B model: softmax reads 4 and writes 2 forward, 4 and 6 backward, of attention
    # weights, their gradient and that of scores; of the matmuls' 6 and 8 bytes, the time beyond that of their FLOP
    scores=(7.8, 9.6),
    softmax_split=(16384, 6.8),  # three kernels: maximum and sum are computed first, and each reads 4
    scaling_traffic=6.8,  # reads and writes 4
    saved_scores=(2.0, 0.0),  # attention weights in 16 bits: `parallel/techniques/attention_gather.py`
    stacked_scores=None,
    # float32 scores, recomputed, and attention weights; then the weights, their gradient and the scores'
    working_scores=6.0,
    extra_score_copies=0.0,
)
JAXPAR = replace(_UNFUSED, split_sequences=_PIECES)
JAXPAR_FUSED = replace(
    _WHOLE,
    split_sequences=_PIECES,
    # counted in the program of a causal ring of 8 with cuDNN's calls, compiled for H100s without cuDNN; rings of 4
    # and Ulysses agree with these numbers to 2 %. A non-causal mask has less
    ring_kernel=RingKernel(
        kernel=CUDNN,
        iteration=((14.0, 16.0), (22.0, 36.0)),
        edges=((38.0, 40.0), (30.0, 52.0)),
        heads=((8.0, 8.0), (8.0, 8.0)),
        small_kernels=(12e-6, 8e-6),
        source="cuDNN's kernel at its share of the peak, and the kernels around it as XLA compiles them",
    ),
)
