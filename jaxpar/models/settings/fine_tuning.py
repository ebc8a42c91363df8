"""The settings of fine-tuning: low-rank adapters, and the loss on preferences.

LoRA is Hu et al. 2021, arXiv:2106.09685; DPO is Rafailov et al. 2023, arXiv:2305.18290.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.errors import Keywords, check_ranges, refuse, suggest

Base = Literal["float", "int8"]
BASES = get_args(Base)


@dataclass(frozen=True, kw_only=True)
class Adapters(Keywords):
    """Low-rank adapters of frozen matrices: x W becomes x W + alpha / rank (x A) B.

    Attributes:
      rank: Columns of A and rows of B; 0 for no adapters.
      alpha: Scales the adapters by alpha / rank; 0 means alpha = rank.
      paths: Patterns of the adapted matrices, such as "blocks/attention/*"; vectors that match get no adapter.
      base: int8 stores these matrices in 8 bits, with one float32 scale per output; float leaves them as they are.
      also: Patterns of the model's own parameters that are trained too, such as a new head.
    """

    rank: int = 0
    alpha: float = 0.0
    paths: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    base: Base = "float"

    def __post_init__(self):
        check_ranges(self, "train.adapters", {"rank": (0, 2**31 - 1), "alpha": (0, 1e30)})
        for name in ("paths", "also"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise refuse(
                    f"train.adapters.{name} = {patterns!r:.60}",
                    rule="patterns of paths are a list of text",
                    fix=f'{name} = ["blocks/attention/*"]',
                )
            object.__setattr__(self, name, tuple(patterns))  # a list in Python, and a value that can be hashed
        if self.base not in BASES:
            raise refuse(
                f"train.adapters.base = {self.base!r:.60}",
                rule=f"a base is kept as {' or '.join(BASES)}",
                fix=suggest(str(self.base), BASES),
            )
        if self.base == "int8" and not self.rank:
            raise refuse(
                'train.adapters.base = "int8" with rank = 0',
                rule="a base in 8 bits is frozen, and needs adapters that are trained",
                fix='adapters = {rank = 16, paths = ["blocks/attention/*"], base = "int8"}',
            )
        if bool(self.rank) != bool(self.paths) or (self.also and not self.rank):
            raise refuse(
                f"train.adapters.rank = {self.rank} with paths = {list(self.paths)}",
                rule="adapters have a rank, and paths that match the matrices they adapt",
                fix='adapters = {rank = 16, paths = ["blocks/attention/*"]}',
            )

    @property
    def scale(self) -> float:
        """The factor alpha / rank of the adapters."""
        return (self.alpha or self.rank) / self.rank if self.rank else 0.0

    @property
    def trained_patterns(self) -> tuple[str, ...]:
        """Patterns of the paths of all trained parameters: adapters and `also`."""
        return ("adapters", *self.also)


@dataclass(frozen=True, kw_only=True)
class DPO(Keywords):
    """Direct preference optimization, for loss = "dpo".

    Attributes:
      beta: Strength of the pull towards the reference: a reward is beta x the log-ratio of model and reference.
      label_smoothing: Probability that the label of a pair is wrong, from 0 to 0.5 (conservative DPO).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self):
        check_ranges(self, "train.dpo", {"beta": (1e-6, 1e6), "label_smoothing": (0.0, 0.5)})
