"""Fused attention kernels: the share of the peak that each reaches on a chip, by pass, sequence length and head_dim.

    share  =  share at long lengths and heads of 128  /  (1 + short / seq)  /  (1 + narrow x (128 / head_dim - 1))

All kernels have the same loss at short lengths and narrow heads: tiles of the softmax that are not full.

A ring calls a kernel once per part: for the device's own tokens with the causal mask, then for unmasked squares of half
as many tokens. On average a query attends to equally many keys in each part, so each part reaches the share of the peak
that sequences as long as a device's tokens reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.errors import check_ranges, refuse

FULL = 128  # width of a head at which the shares below are published


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused attention kernel.

    Attributes:
      name: Name of the kernel.
      shares: Chip to the shares of its bfloat16 peak, forward and backward, causal, over long sequences.
      short: Sequence length at which time doubles.
      narrow: Relative additional time with heads half as wide as 128.
      source: Source of the numbers.
    """

    name: str
    shares: Mapping[str, tuple[float, float]]
    short: float
    narrow: float
    source: str

    def __post_init__(self):
        check_ranges(self, "kernel", {"short": (0.0, 1e5), "narrow": (0.0, 10.0)})

    def peak_shares(self, chip: str, seq: int, head_dim: float, *, default: tuple[float, float]) -> tuple[float, float]:
        """Returns the shares of the peak on a chip, forward and backward.

        Args:
          chip: Key of the chip.
          seq: Tokens of a row.
          head_dim: Width of a head.
          default: Shares over long rows on chips that are not in `shares`.

        >>> CUDNN.peak_shares("h100", 10**9, 128, default=(0.5, 0.4))
        (0.535, 0.45)
        """
        shares, loss = self.shares.get(chip, default), self.slowdown(seq, head_dim)
        return round(shares[0] / loss, 4), round(shares[1] / loss, 4)

    def slowdown(self, seq: np.ndarray | float, head_dim: float) -> Any:
        """Returns the time at a sequence length (number or array) and head_dim, relative to the time without losses.

        >>> CUDNN.slowdown(224, 128)
        2.0
        """
        return (1 + self.short / seq) * (1 + self.narrow * max(FULL / head_dim - 1, 0.0))


Both = tuple[float, float]  # forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class RingKernel:
    """A fused kernel that runs ring or Ulysses attention in parts, and the ops around it.

    Bytes are memory traffic (per element of a device's queries, per element of its keys), forward and backward.

    Attributes:
      kernel: The fused kernel.
      iteration: Bytes of each iteration except the first and the last: slices of arrays for the kernel, and the
        float32 sum of its results.
      edges: Bytes of the first and the last iteration, with the token permutes of a causal ring before and after them.
      heads: Bytes of transposing heads and tokens, if devices exchange heads.
      small_kernels: Seconds of the small kernels of each iteration except the first, independent of its size.
      source: Source of the numbers.
    """

    kernel: Kernel
    iteration: tuple[Both, Both]
    edges: tuple[Both, Both]
    heads: tuple[Both, Both]
    small_kernels: Both
    source: str

    def __post_init__(self):
        numbers = {
            key: [entry for pair in getattr(self, key) for entry in pair] for key in ("iteration", "edges", "heads")
        }
        for key, values in {**numbers, "small_kernels": self.small_kernels}.items():
            bound = 1.0 if key == "small_kernels" else 1e4
            if not all(0 <= number <= bound for number in values):
                raise refuse(f"ring_kernel.{key}={getattr(self, key)}", rule=f"numbers within 0..{bound}", fix="0.0")

    def traffic(
        self,
        way: int,
        queries: np.ndarray | float,
        keys: np.ndarray | float,
        *,
        ring: np.ndarray | float,
        ulysses: np.ndarray | float,
    ) -> Any:
        """Returns the memory traffic of all iterations, from elements of queries and keys; way is 0 forward."""
        repeats = np.maximum(np.subtract(ring, 2), 0), np.greater(ring, 1), np.greater(ulysses, 1)
        traffic = self.iteration[way], self.edges[way], self.heads[way]
        return sum(n * (q * queries + k * keys) for n, (q, k) in zip(repeats, traffic, strict=True))


_LOSSES = {"short": 224.0, "narrow": 0.14}
_LOSSES_SOURCE = "losses at short lengths and narrow heads fitted on published runs"
FLASH_2 = Kernel(
    name="FlashAttention-2",
    shares={"a100": (0.60, 0.50), "h100": (0.34, 0.30), "h200": (0.34, 0.30)},
    **_LOSSES,
    source="Dao 2023, arXiv:2307.08691, figures 4 to 6, for A100; Shah et al. 2024, arXiv:2407.08608, figures 5 and 6, "
    f"for H100, an H200 is taken for one; {_LOSSES_SOURCE}",
)
FLASH_1 = Kernel(
    name="FlashAttention, in Triton",
    shares={"a100": (0.373, 0.326), "h100": (0.201, 0.175), "h200": (0.201, 0.175)},
    **_LOSSES,
    source="fitted on llm-foundry's runs; H100 over A100 near what FlashAttention-2 has in both papers, 1.8 times, for "
    f"neither uses Hopper's own instructions; {_LOSSES_SOURCE}",
)
CUDNN = Kernel(
    name="cuDNN",
    shares={"a100": (0.60, 0.50), **dict.fromkeys(("h100", "h200", "b200"), (0.535, 0.45))},
    **_LOSSES,
    source="Shah et al. 2024, arXiv:2407.08608, figures 5 and 6, for H100; assumed: on A100 as FlashAttention-2, on "
    f"H200 and B200 the H100's shares; {_LOSSES_SOURCE}",
)


# Cost of blockwise attention per pair of blocks: memory traffic, and the time of small kernels.


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCost:
    """The cost of a pair of blocks besides its matmuls; tuples are (forward, backward).

    Attributes:
      scores: Memory traffic in bytes per score of a pair, beyond what its matmuls hide.
      queries: Bytes per element of a pair's queries [queries, heads, head_dim]: each block of keys reads them again,
        and reads, scales and writes as many elements of sums.
      keys: Bytes per element of its keys [keys, kv_heads, head_dim]; backward also of the sums of their gradients.
      pair: Seconds of the small kernels of a pair, independent of its size.
      least: Fewest seconds of a pair: all its kernels, each at least as long as a small kernel.
    """

    scores: Both = (0.0, 0.0)
    queries: Both = (0.0, 0.0)
    keys: Both = (0.0, 0.0)
    pair: float = 0.0
    least: Both = (0.0, 0.0)

    def __post_init__(self):
        for key, bound in dict.fromkeys(("scores", "queries", "keys"), 1e4).items() | {("least", 1.0)}:
            pair = getattr(self, key)
            if not (len(pair) == 2 and all(0 <= number <= bound for number in pair)):
                raise refuse(f"pair_cost.{key}={pair}", rule=f"two numbers within 0..{bound}", fix=f"{key}=(0.0, 0.0)")
        if not 0 <= self.pair <= 1:
            raise refuse(f"walk.pair={self.pair}", rule="seconds within 0..1", fix="pair=1e-5")

    def traffic(
        self, way: int, scores: np.ndarray | float, queries: np.ndarray | float, keys: np.ndarray | float
    ) -> Any:
        """Returns the bytes that a pair of blocks moves, by its numbers of elements; way is 0 forward, 1 backward."""
        return self.scores[way] * scores + self.queries[way] * queries + self.keys[way] * keys


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKernels:
    """Numbers of kernels of a block, each of which takes at least as long as the smallest one; (forward, backward).

    Attributes:
      arrays: Elementwise kernels on arrays of all tokens, without those of scores.
      numbers: Kernels on a number per token or per channel, such as sums of a norm.
      weights: Kernels per matrix: a cast or a slice of its weights in both passes, and in the backward pass also its
        gradient's, which is written to a stack.
      around_collectives: Further ones per matrix in the backward pass, if devices share the training state.
      cast_bytes: Bytes per weight that a pass reads and writes to cast it, if no copy in 16 bits exists.
      copy_bytes: Bytes per parameter and step of copies around fsdp's gather and scatter.
      stacks: Kernels that write residuals to stacks of all layers, without recomputation.
      matmuls: Matmuls of unfused attention, each with the fixed cost of a matmul.
      source: Source of the numbers.
    """

    arrays: Both
    numbers: Both
    weights: Both
    around_collectives: float
    cast_bytes: float
    copy_bytes: float
    stacks: float
    matmuls: Both
    source: str


# The share of its peak that a chip reaches in a matmul, by size and by shape.
#
#     seconds of [m, k] x [k, n]  =  waves x (2 x 128 x 256 x k / (peak / cores x top) + wave)  +  half / (peak x top)
#
# A matmul computes tiles of its result, one per core at a time. Each round of tiles, a wave, has a fixed cost, which
# matters more for short k; in the last wave some cores have no tile, which matters more if there are few waves. Source:
# NVIDIA, Matrix Multiplication Background User's Guide, sections 3 and 4, "tile quantization" and "wave quantization",
# with its tile of 128 x 256.

TILE = (128, 256)  # part of the result that one core computes at a time
RANGES = {"top": (1e-3, 1.0), "half": (0.0, 1e15), "wave": (0.0, 1e-3), "ragged": (0.0, 1.0), "cores": (0, 1_000_000)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """Constants of the formula above.

    Attributes:
      top: Share of the peak that very large matmuls reach.
      half: FLOP of the matmul that reaches half of `top`; its fixed cost is the launch.
      wave: Seconds that each wave of tiles takes to begin and to end.
      ragged: Share of the last wave's idle cores that is lost; libraries choose smaller tiles for the rest.
      cores: Cores of the chip, each of which computes a tile at a time; 0 if unknown, and then tiles are not modelled.
      source: Origin of the numbers, as text.
    """

    top: float
    half: float
    wave: float = 0.0
    ragged: float = 0.0
    cores: int = 0
    source: str

    def __post_init__(self):
        check_ranges(self, "gemm", RANGES)

    def share(self, flop: np.ndarray | float) -> Any:
        """Returns the share of the peak for matmuls of this many FLOP, a number or an array.

        >>> Gemm(top=0.8, half=4e9, source="").share(4e9)
        0.4
        """
        return self.top * flop / (flop + self.half)

    def fixed(self, peak: float) -> float:
        """Returns the seconds of a matmul that do not depend on its size, on a chip of this many FLOP per second."""
        return self.half / (peak * self.top)

    def seconds(self, m: np.ndarray | float, k: np.ndarray | float, n: np.ndarray | float, *, peak: float) -> Any:
        """Returns the seconds of a matmul [m, k] x [k, n].

        Args:
          m: Rows of the result, a number or an array, as k and n.
          k: Length of the sums.
          n: Columns of the result.
          peak: FLOP per second of the chip.
        """
        cores, fixed = self.cores, self.fixed(peak)
        if not cores:
            return 2.0 * m * k * n / (peak * self.top) + fixed
        even = 1.0 * m * n / (TILE[0] * TILE[1] * cores)
        full_waves = np.ceil(np.ceil(m / TILE[0]) * np.ceil(n / TILE[1]) / cores)
        waves = even + self.ragged * np.maximum(full_waves - even, 0.0)
        return waves * (2.0 * TILE[0] * TILE[1] * k * cores / (peak * self.top) + self.wave) + fixed
