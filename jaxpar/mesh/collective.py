"""The noun that observation and prediction share: one collective of a step."""

from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
         "collective-broadcast")  # fmt: skip
_WIRE = {"all-reduce": 2.0}


def wire_bytes(kind: str, payload: float, group: int) -> float:
    """Returns the bytes that each device sends in one collective of ring algorithms.

    Source: Thakur, Rabenseifner, Gropp (2005), section 4: (n-1)/n of the payload, all-reduce twice.
    For a ragged all-to-all it is the most that can travel.

    >>> wire_bytes("all-reduce", 800, 8)
    1400.0
    """
    return payload if kind == "collective-permute" else _WIRE.get(kind, 1.0) * payload * (group - 1) / group


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a step, as often as it runs.

    Attributes:
      kind: One of `KINDS`.
      axes: The mesh axes it runs over; `~data` is a part of an axis.
      dtype: Of what travels, in HLO's words.
      group: Devices that take part together.
      times: How often it runs in a step; None where a loop's trip count is not known.
      payload: Bytes per device, each time: of the whole array that is reduced, gathered or scattered,
        of what is sent in an all-to-all or a permute.
      senders: The share of devices that send, below 1 in an open chain of permutes.
      asynchronous: Whether something else may run meanwhile.
      operation: The JAX operation it comes from.
      source: The user's line it comes from, `file.py:12`.
      cause: The parameter or the activation that is sent, as far as it is known.
      loop: How deep in loops it stands, and how often each turns, outermost first.
      backward: Whether it belongs to the backward pass.
      parameters: The paths of the parameters that travel, or whose gradient does: several where shapes are equal.
      count: How many arrays the compiler sends in one, where it combined several.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    group: int
    times: int | None
    payload: int
    senders: float = 1.0
    asynchronous: bool = False
    operation: str = ""
    source: str = ""
    cause: str = ""
    loop: tuple[int | None, ...] = ()
    backward: bool = False
    parameters: tuple[str, ...] = ()
    count: int = 1

    @property
    def wire(self) -> float:
        """Bytes that each device sends, each time."""
        return wire_bytes(self.kind, self.payload * self.senders, self.group)

    @property
    def parameter(self) -> bool:
        """Whether it sends a parameter or its gradient."""
        return bool(self.parameters)

    @property
    def axis(self) -> str:
        """The axes as one word: `data,fsdp`."""
        return ",".join(self.axes)

    @property
    def step_payload(self) -> int:
        """Payload bytes of a step; once, where the number of times is unknown."""
        return self.payload * (1 if self.times is None else self.times)

    @property
    def step_wire(self) -> float:
        """Wire bytes of a step; once, where the number of times is unknown."""
        return self.wire * (1 if self.times is None else self.times)
