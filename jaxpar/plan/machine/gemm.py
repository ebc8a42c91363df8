"""The share of its peak that a chip reaches in a matmul, by size and by shape.

    seconds of [m, k] x [k, n]  =  waves x (2 x 128 x 256 x k / (peak / cores x top) + wave)  +  half / (peak x top)

A matmul computes tiles of its result, one per core at a time. Each round of tiles, a wave, has a fixed cost, which
matters more for short k; in the last wave some cores have no tile, which matters more if there are few waves. Source:
NVIDIA, Matrix Multiplication Background User's Guide, sections 3 and 4, "tile quantization" and "wave quantization",
with its tile of 128 x 256.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.errors import check_ranges

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
      cores: Cores of the chip, each of which computes a tile at a time; 0 if unknown: tiles are then not counted.
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

    def share(self, flop: Any) -> Any:
        """Returns the share of the peak for matmuls of so many FLOP, a number or an array.

        >>> Gemm(top=0.8, half=4e9, source="").share(4e9)
        0.4
        """
        return self.top * flop / (flop + self.half)

    def seconds(self, m: Any, k: Any, n: Any, *, peak: float) -> Any:
        """Returns the seconds of a matmul [m, k] x [k, n].

        Args:
          m: Rows of the result, a number or an array, as k and n.
          k: Length of the sums.
          n: Columns of the result.
          peak: FLOP per second of the chip.
        """
        cores = self.cores
        fixed = self.half / (peak * self.top)
        if not cores:
            return 2.0 * m * k * n / (peak * self.top) + fixed
        even = 1.0 * m * n / (TILE[0] * TILE[1] * cores)
        full_waves = np.ceil(np.ceil(m / TILE[0]) * np.ceil(n / TILE[1]) / cores)
        waves = even + self.ragged * np.maximum(full_waves - even, 0.0)
        return waves * (2.0 * TILE[0] * TILE[1] * k * cores / (peak * self.top) + self.wave) + fixed
