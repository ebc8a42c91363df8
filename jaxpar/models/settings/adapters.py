"""The settings of low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.errors import Keywords, check_ranges, nearest, refuse

Base = Literal["float", "int8"]
BASES = get_args(Base)


@dataclass(frozen=True, kw_only=True)
class Adapters(Keywords):
    """Low-rank adapters beside matrices of a model, which are frozen: x W becomes x W + alpha / rank (x A) B.

    Attributes:
      rank: Columns of A and rows of B; 0 for no adapters.
      alpha: Times 1 / rank, the factor of what adapters add; 0 means as much as rank.
      paths: Patterns of the matrices, such as "blocks/attention/*"; of vectors that a pattern matches none has one.
      base: int8 keeps these matrices in 8 bits, with one float32 scale for each of their outputs; float as the model
        has them.
      also: Patterns of parameters of the model itself that are trained besides, such as a new head.
    """

    rank: int = 0
    alpha: float = 0.0
    paths: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    base: Base = "float"

    def __post_init__(self):
        check_ranges(self, "train.adapters", {"rank": (0, 2**31 - 1), "alpha": (0, 1e30)})
        for name in ("paths", "also"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(each, str) for each in given):
                raise refuse(
                    f"train.adapters.{name} = {given!r:.60}",
                    rule="patterns of paths are a list of text",
                    fix=f'{name} = ["blocks/attention/*"]',
                )
            object.__setattr__(self, name, tuple(given))  # a list in Python, and a value that can be hashed
        if self.base not in BASES:
            raise refuse(
                f"train.adapters.base = {self.base!r:.60}",
                rule=f"a base is kept as {' or '.join(BASES)}",
                fix=nearest(str(self.base), BASES),
            )
        if self.base == "int8" and not self.rank:
            raise refuse(
                'train.adapters.base = "int8" with rank = 0',
                rule="what is kept in 8 bits is frozen, beside adapters that are trained",
                fix='adapters = {rank = 16, paths = ["blocks/attention/*"], base = "int8"}',
            )
        if bool(self.rank) != bool(self.paths) or (self.also and not self.rank):
            raise refuse(
                f"train.adapters.rank = {self.rank} with paths = {list(self.paths)}",
                rule="adapters have a rank, and are beside the matrices that paths match",
                fix='adapters = {rank = 16, paths = ["blocks/attention/*"]}',
            )

    @property
    def scale(self) -> float:
        """The factor of what adapters add."""
        return (self.alpha or self.rank) / self.rank if self.rank else 0.0

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of all that is trained."""
        return ("adapters", *self.also)
