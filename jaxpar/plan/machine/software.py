"""Software models: the kernels of a training program, its elementwise ops, and what overlaps.

Bytes are of bfloat16 activations with dropout where the program has it; each number counts reads and writes of the
kernels that the program runs, so it can be checked by reading them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import Exchange
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.kernels import CUDNN, FLASH_2, Kernel, Parts
from jaxpar.plan.machine.walk import Walk


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareModel:
    """The way a program runs a transformer.

    Attributes:
      attention: "unfused": scores go to memory; "fused": they do not, and a causal kernel does half of them.
      pieces: The software model of layouts that cut sequences, where it is another: cuDNN's kernel takes whole ones.
      parts: The fused kernel that runs attention in parts where pieces of sequences travel; None for blocks of plain
        JAX, which `walk` and the `core` of `pieces` are of.
      core: Share of the peak that attention's matmuls reach, forward and backward, where no kernel says it.
      kernel: The fused kernel, which has shares of its own on the chips that it is known on.
      scores: Bytes per score to and from memory, forward and backward, of unfused attention.
      kept: Bytes per score kept for the backward pass, and of them those of matmuls alone; 0 where attention is fused.
      worked: Bytes per score that the backward of a layer works with, where nothing of them is kept.
      split: Keys of a row up to which the softmax of unfused attention is one kernel, 0 for any number; beyond, what it
        moves more per score going forward.
      scaled: The same where a device has more than one row and more than one head of keys: of scores with one more dim,
        what scales them is no part of the softmax's kernel.
      walk: The kernels of attention that goes pair by pair of blocks.
      relaid: How often more scores are kept because XLA lays them forward in one order and backward in another, where
        a device has more than one pair of a row and a head of keys; a quarter as many more while they are worked
        with, where it has more rows than heads of keys.
      residual: Bytes per element [tokens, dim] that a layer keeps where nothing is computed again.
      stream: Bytes per element [tokens, dim] of norms, dropout and residuals, forward and backward.
      inner: Bytes per element of the widths that the tensor axis cuts: q, k, v and the feed-forward's hidden.
      logits: Bytes per logit of the loss, forward and backward together.
      accumulate: Bytes per parameter and microbatch to add up gradients.
      update: Bytes per parameter of the optimizer's step, all reads and writes.
      wire: Bytes per parameter that fsdp gathers, and per gradient that fsdp and data reduce.
      keep: Bytes moved for each byte that is kept for the backward pass, to lay it beside that of other layers and to
        take it out again, and as many for the slots of a pipeline; 0 where it stays where it was computed.
      eager: Whether gradients are reduced for every microbatch, rather than their sum once a step.
      layerwise: Whether each layer's parameters are gathered, and its gradients reduced, by collectives of its own.
      bucket: Bytes of gradients in one collective, where the software fills buckets with them: the last one is full
        when the backward pass ends, and has nothing to hide behind. 0 where each layer has its own collective.
      reduce_whole: Whether ZeRO-1 sums whole gradients on every device, once a step, by all-reduces over fsdp and data.
      broadcast_arrays: Arrays of a layer, where ZeRO-1 and 2 leave each of them whole to one device of fsdp, which
        sends it to the others in a broadcast after the update; 0 where all devices gather shards.
      exposed_update: Whether a step ends with that gather or broadcast of updated parameters, and nothing hides it.
      overlap: Share of collectives over fsdp and data that computation hides, while there is enough of it.
      copies: The same for all-reduces of gradients over data, where that is another share.
      interference: By which share of the time that their bytes would take inside a node hidden collectives of fsdp
        and data slow the computation beside them, which shares cores and memory with them.
      ends: Whether each pass begins or ends with a gather that has nothing to hide behind: the first layer's going
        forward, the first ones' going backward; with parameters sharded, and collectives by layer.
      tensor_overlap: The same for those of the tensor axis that a matmul can run beside.
      context_overlap: The same for those of the context axis.
      context_shards: Whether devices of the context axis share what fsdp shards, as more devices of fsdp would.
      context_again: Whether the backward pass gathers the keys and values of other pieces again, and keeps none.
      regather: Whether sequence parallelism gathers a matmul's input again for its weights' gradient, to keep less.
      dropout: Whether masks are kept.
      host: Seconds of a step in which chips wait for the host: the optimizer's launches, clipping, logging.
      waits: Seconds in which the chip waits for the host in a block, forward and backward; 0 where launches run ahead.
      run: "asynchronous": stages run freely; "barrier": tick by tick, one program on all devices.
      exchange: How replicas over data agree.
      scatter: Whether tensor ranks each send their share of a pipeline's message, and gather it after.
      source: Where the numbers come from.
    """

    attention: Literal["unfused", "fused"]
    pieces: "SoftwareModel | None" = None
    parts: Parts | None = None
    core: tuple[float, float]
    kernel: Kernel | None = None
    scores: tuple[float, float] = (0.0, 0.0)
    kept: tuple[float, float] = (0.0, 0.0)
    worked: float = 0.0
    split: tuple[int, float] = (0, 0.0)
    scaled: float = 0.0
    walk: Walk = field(default_factory=Walk)
    relaid: float = 0.0
    residual: float = 8.0
    stream: tuple[float, float]
    inner: tuple[float, float]
    logits: float
    accumulate: float
    update: float
    wire: tuple[float, float] = (2.0, 2.0)
    keep: float = 0.0
    eager: bool = False
    layerwise: bool = True
    bucket: float = 0.0
    reduce_whole: bool = False
    broadcast_arrays: int = 0
    exposed_update: bool = False
    overlap: float
    copies: float | None = None
    interference: float = 0.0
    ends: bool = False
    tensor_overlap: float = 0.0
    context_overlap: float = 0.0
    context_shards: bool = False
    context_again: bool = False
    regather: bool = False
    dropout: bool = False
    host: float = 0.0
    waits: tuple[float, float] = (0.0, 0.0)
    run: Literal["asynchronous", "barrier"] = "asynchronous"
    scatter: bool = False
    exchange: Exchange = field(default_factory=AllReduce)
    source: str

    def score(self, keys: int, candidate: Candidate, kv_heads: int) -> tuple[Any, Any]:
        """Returns the bytes per score of unfused attention to rows of so many keys, forward and backward."""
        most, more = self.split
        several = np.greater(candidate.microbatch, 1) & np.greater(kv_heads, candidate.tensor)
        return self.scores[0] + more * bool(most and keys > most) + self.scaled * several, self.scores[1]

    def cost(self, of: Callable[["SoftwareModel"], tuple[Any, ...]], candidate: Candidate) -> tuple[Any, ...]:
        """Returns what something costs by this software, or by that of `pieces` where sequences are cut."""
        whole = of(self)
        if self.pieces is None or not np.any(cut := np.greater(candidate.context, 1)):
            return whole
        return tuple(np.where(cut, *each) for each in zip(of(self.pieces), whole, strict=True))

    def sharers(self, candidate: Candidate) -> Any:
        """Returns how many devices share what fsdp shards."""
        shared = np.logical_or(self.context_shards, candidate.zero_context) & np.greater(candidate.zero, 0)
        return candidate.fsdp * np.where(shared, candidate.context, 1)

    def keeps_gathered(self, candidate: Candidate) -> Any:
        """Returns whether stage 3 keeps what it gathered going forward: for JAX it is a result like any other."""
        alone = np.equal(candidate.pipe, 1) & np.greater(self.sharers(candidate), 1) & np.equal(candidate.zero, 3)
        return self.everywhere & alone & np.equal(candidate.remat, "none")

    @property
    def everywhere(self) -> bool:
        """Whether every stage holds the embedding and the head, as in one program on all devices."""
        return self.run == "barrier"

    def __post_init__(self):
        check_ranges(
            self,
            "software model",
            {key: (0.0, 1e4) for key in ("worked", "relaid", "residual", "logits", "accumulate", "update", "keep")}
            | {key: (0.0, 1.0) for key in ("overlap", "tensor_overlap", "context_overlap")}
            | {"interference": (0.0, 10.0), "host": (0.0, 60.0), "bucket": (0.0, 1e15), "broadcast_arrays": (0, 1e4)},
        )
        pairs = {"core": (1e-3, 1.0)} | dict.fromkeys(
            ("scores", "kept", "stream", "inner", "wire", "waits"), (0.0, 1e4)
        )
        for key, (low, high) in pairs.items():
            pair = getattr(self, key)
            if not (len(pair) == 2 and all(low <= number <= high for number in pair)):
                raise refuse(
                    f"software.{key}={pair}", rule=f"two numbers within {low}..{high}", fix=f"{key}=(0.5, 0.5)"
                )


# fitted on published runs with the constants of hardware.py; `python -m tests.bench.planner --leave-out group` prints
# them
HOST = 0.0445  # seconds of a step in which eager PyTorch's chips wait for the host; where it is compiled, half
_OP = 2.14e-4  # seconds of an op where every launch is waited for: Python, autograd, launch, and the wait for its end
_INTERFERENCE = 0.8
_HIDDEN = 0.73  # share of gathers and scatters that XLA hides in MaxText's loop over layers

MEGATRON_2022 = SoftwareModel(
    attention="unfused",
    core=(0.6, 0.5),  # assumed: matmuls of width dim / heads, beside which scores are written and read
    # forward: QK^T writes 2, softmax 2 + 2, dropout 2 + 2 + mask 1, PV reads 2
    # backward: dV and dP 2 + 2, dropout 2 + 1 + 2, softmax 2 + 2 + 2, dQ and dK 2 + 2
    scores=(13.0, 19.0),
    kept=(5.0, 2.0),  # softmax 2, mask 1, matmul 2: Korthikanti et al., section 4.1
    # forward: 2 norms of 2 + 2; 2 times bias, dropout and residual of 2 + 2 + 2 + mask 1
    # backward: 2 norms of 2 + 2 + 2, 2 dropouts of 2 + 1 + 2 and 2 for the bias, 2 sums of 2 + 2 + 2
    stream=(22.0, 38.0),
    # forward: bias or gelu 2 + 2; backward: 2 + 2 + 2, and 2 for the bias
    inner=(4.0, 8.0),
    logits=50.0,  # to float32 6, max 4, subtract 8, exp 8, sum 4, divide 8; backward 12
    accumulate=8.0,  # float32 sum, read and written by the matmul that makes the gradient
    update=58.0,  # unscale 8, norm 4, clip 8, Adam 16 + 12, to bfloat16 6, zero 4
    layerwise=False,  # one buffer holds the gradients of all layers: Megatron-LM's DistributedDataParallel
    overlap=0.0,  # its schedule ends with the all-reduce
    tensor_overlap=0.5,  # assumed: a collective takes processors and bandwidth from the matmul beside it
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
    waits=(20 * _OP, 40 * _OP),
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
    logits=24.0,  # to float32 6, softmax 8; backward 10
    accumulate=0.0,  # one microbatch a step
    update=40.0,  # norm 4, clip 8, Adam 16 + 12
    wire=(2.0, 4.0),
    overlap=1.0,
    interference=_INTERFERENCE,
    ends=True,
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
    copies=0.0,  # the last op of a loop over layers; XLA moves none across its turns unless it is told to
    interference=0.0,
    host=0.0,
    source="MaxText with cuDNN's fused attention, elementwise ops as XLA fuses them; overlap fitted",
)

_WHOLE = replace(
    MAXTEXT,
    accumulate=12.0,  # the microbatch's gradient written 4, the sum read 4 and written 4
    wire=(2.0, 2.0),  # cast before they travel: tests/test_collectives.py
    residual=8.0,  # two norms' inputs, and what they hand to matmuls: `models/own_backward.py`
    keep=5.0,  # a scan over layers copies it into one array for all, and each layer's out of it; a buffer is cleared
    # replayed from two layers of an 8B model on 8 H100s, rings at 32,768 tokens in blocks of 128 x 256 to 512 x 512
    walk=Walk(
        scores=(19.4, 17.0),
        queries=(32.8, 26.4),
        keys=(12.8, 64.0),
        pair=12e-6,
        least=(28e-6, 32e-6),  # 14 and 16 kernels of 2 us: met where heads are few, as where all are exchanged
    ),
    eager=True,  # a scan over microbatches; pipelines reduce and gather once, around their table
    copies=None,
    ends=False,  # in what is replayed
    overlap=0.3,  # replayed: 8 to 35 % of it is hidden in an 8B model on 64 H100s, as XLA 0.12 orders it
    tensor_overlap=0.5,  # replayed in the same programs
    context_overlap=0.8,  # replayed: half of it is hidden over two nodes, 75 to 92 % inside one
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
    # backward: dP 4, softmax 4 + 4 and select 4, half of it beside matmuls
    scores=(16.0, 15.0),
    kept=(11.0, 4.0),  # of a Llama 8B as XLA 0.12 compiles it: 6 to 12 by layout; float32 results of matmuls
    worked=11.0,  # in the same programs
    relaid=1.0,
    source="jaxpar as XLA compiles it where there is no cuDNN: scores in float32, to memory and back; overlap as "
    "replayed from compiled programs, not measured",
)

_PIECES = replace(
    _UNFUSED,
    # replayed from gathered keys of an 8B model: softmax reads 4 and writes 2 forward, and backward 4 and 6 of shares,
    # their gradient and that of scores; of matmuls' 6 and 8 what takes longer than their FLOP
    scores=(7.8, 9.6),
    split=(16384, 6.8),  # three kernels: the largest and the sum are found first, and each reads 4
    scaled=6.8,  # read and written 4
    kept=(2.0, 0.0),  # shares in 16 bits: `parallel/techniques/attention_gather.py`
    worked=6.0,  # scores made again, in float32, and the shares; then these, their gradient and that of scores
    relaid=0.0,
)
JAXPAR = replace(_UNFUSED, pieces=_PIECES)
JAXPAR_FUSED = replace(
    _WHOLE,
    pieces=_PIECES,
    # counted in the program of a causal ring of 8 with cuDNN's calls in it, compiled without it for H100s; rings of 4
    # and heads for tokens have what these say to 2 %. A mask that is not causal has less
    parts=Parts(
        kernel=CUDNN,
        turn=((14.0, 16.0), (22.0, 36.0)),
        ends=((38.0, 40.0), (30.0, 52.0)),
        heads=((8.0, 8.0), (8.0, 8.0)),
        small=(12e-6, 8e-6),
        source="cuDNN's kernel at its share of the peak, and the kernels around it as XLA compiles them",
    ),
)
