"""Links: the time of a message between two devices."""

from dataclasses import dataclass

from jaxpar.errors import check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link in the alpha-beta-gamma model: n bytes take `latency + n / bandwidth`.

    Attributes:
      latency: Seconds until the first byte arrives, alpha.
      bandwidth: Bytes per second one way, of one device, 1 / beta.
      combine: Seconds per byte to add two buffers, gamma; 0 if it overlaps with the transfer.

    Source: Thakur, Rabenseifner, Gropp (2005), section 3.
    """

    latency: float
    bandwidth: float
    combine: float = 0.0

    def __post_init__(self):
        check_ranges(self, "", {"latency": (0.0, 60.0), "bandwidth": (1.0, 1e18), "combine": (0.0, 1.0)})

    def time(self, size: float) -> float:
        """Returns the seconds of a message of `size` bytes.

        >>> Link(latency=5e-6, bandwidth=12e9).time(12e9)
        1.000005
        """
        return self.latency + size / self.bandwidth
