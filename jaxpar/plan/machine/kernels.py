"""Attention kernels: the share of the peak that each reaches on a chip, by direction, length and width of a head.

    share  =  share at long lengths and heads of 128  /  (1 + short / seq)  /  (1 + narrow x (128 / head_dim - 1))

The loss at short lengths and narrow heads is the same for all of them: tiles of the softmax that are not full.

A ring runs them in parts: its own tokens under the causal mask, then squares of half as many that see each other. A
query meets as many keys in each on average, so that all lose what rows of as many tokens as a device has lose.
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
      name: Of the kernel.
      shares: Chip to the shares of its bfloat16 peak, forward and backward, causal, over long sequences.
      short: Length at which half is lost.
      narrow: Share that is lost, in units of what is left, with heads half as wide.
      source: Where they come from.
    """

    name: str
    shares: Mapping[str, tuple[float, float]]
    short: float
    narrow: float
    source: str

    def __post_init__(self):
        check_ranges(self, "kernel", {"short": (0.0, 1e5), "narrow": (0.0, 10.0)})

    def core(self, chip: str, seq: int, head_dim: float, *, other: tuple[float, float]) -> tuple[float, float]:
        """Returns the shares on a chip, forward and backward.

        Args:
          chip: Its key.
          seq: Tokens of a row.
          head_dim: Width of a head.
          other: The shares over long rows on chips that the kernel is not known on.

        >>> CUDNN.core("h100", 10**9, 128, other=(0.5, 0.4))
        (0.535, 0.45)
        """
        found, lost = self.shares.get(chip, other), self.lost(seq, head_dim)
        return round(found[0] / lost, 4), round(found[1] / lost, 4)

    def lost(self, seq: Any, head_dim: float) -> Any:
        """Returns how many times as long it takes at a length, a number or an array, and width as without its losses.

        >>> CUDNN.lost(224, 128)
        2.0
        """
        return (1 + self.short / seq) * (1 + self.narrow * max(FULL / head_dim - 1, 0.0))


Both = tuple[float, float]  # forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A fused kernel that runs attention in parts, one turn of a ring after the other, and what is made of the parts.

    Bytes to and from memory are per entry of a device's queries, and per entry of its keys, of which there are as many
    as of values; forward and backward.

    Attributes:
      kernel: It.
      turn: Bytes of each turn but the first and the last: what is cut out of arrays for the kernel, and its results
        added up in float32.
      ends: Of the first and the last turn with what is before and after them: at the door of a causal ring.
      heads: Of laying heads and tokens anew, where devices exchange heads.
      small: Seconds of the small kernels of a turn but the first, as long whatever its size.
      source: Where the numbers come from.
    """

    kernel: Kernel
    turn: tuple[Both, Both]
    ends: tuple[Both, Both]
    heads: tuple[Both, Both]
    small: Both
    source: str

    def __post_init__(self):
        numbers = {key: [each for both in getattr(self, key) for each in both] for key in ("turn", "ends", "heads")}
        for key, found in {**numbers, "small": self.small}.items():
            most = 1.0 if key == "small" else 1e4
            if not all(0 <= number <= most for number in found):
                raise refuse(f"parts.{key}={getattr(self, key)}", rule=f"numbers within 0..{most}", fix="0.0")

    def moved(self, way: int, queries: Any, keys: Any, *, ring: Any, ulysses: Any) -> Any:
        """Returns the bytes of all turns with so many entries of queries and of keys; way is 0 going forward."""
        turns = np.maximum(np.subtract(ring, 2), 0), np.greater(ring, 1), np.greater(ulysses, 1)
        kinds = self.turn[way], self.ends[way], self.heads[way]
        return sum(times * (q * queries + k * keys) for times, (q, k) in zip(turns, kinds, strict=True))


_LOST = {"short": 224.0, "narrow": 0.14}
_LOST_SOURCE = "losses at short lengths and narrow heads fitted on published runs"
FLASH_2 = Kernel(
    name="FlashAttention-2",
    shares={"a100": (0.60, 0.50), "h100": (0.34, 0.30), "h200": (0.34, 0.30)},
    **_LOST,
    source="Dao 2023, arXiv:2307.08691, figures 4 to 6, for A100; Shah et al. 2024, arXiv:2407.08608, figures 5 and 6, "
    f"for H100, an H200 is taken for one; {_LOST_SOURCE}",
)
FLASH_1 = Kernel(
    name="FlashAttention, in Triton",
    shares={"a100": (0.373, 0.326), "h100": (0.201, 0.175), "h200": (0.201, 0.175)},
    **_LOST,
    source="fitted on llm-foundry's runs; H100 over A100 near what FlashAttention-2 has in both papers, 1.8 times, for "
    f"neither uses Hopper's own instructions; {_LOST_SOURCE}",
)
CUDNN = Kernel(
    name="cuDNN",
    shares={"a100": (0.60, 0.50), **dict.fromkeys(("h100", "h200", "b200"), (0.535, 0.45))},
    **_LOST,
    source="Shah et al. 2024, arXiv:2407.08608, figures 5 and 6, for H100; assumed: on A100 as FlashAttention-2, on "
    f"H200 and B200 the H100's shares; {_LOST_SOURCE}",
)
