"""The settings of rotary positions whose frequencies are scaled for a longer context: YaRN and LongRoPE."""

import math
from dataclasses import dataclass, fields

from jaxpar.errors import Keywords, check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class YarnConfig(Keywords):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): slow pairs rotate `factor` times slower, fast ones are unchanged.

    Attributes:
      factor: The context length over the original one; 0 for no YaRN.
      seq: The original context length (original_max_position_embeddings).
      beta_fast: Pairs that turn more often within `seq` positions are unchanged.
      beta_slow: Pairs that turn less often within `seq` positions rotate `factor` times slower; those between the two
        are interpolated.
      truncate: Whether the interpolation begins and ends at whole pairs.
      attention_factor: Factor of the rotated queries and keys; 0 means 0.1 ln(factor) + 1.
    """

    factor: float = 0.0
    seq: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0

    def __post_init__(self):
        if type(self.truncate) is not bool:
            raise refuse(
                f"rope_yarn.truncate = {self.truncate!r:.60}",
                rule="truncate is a bool",
                fix="rope_yarn.truncate = True, or False",
            )
        check_ranges(self, "model.rope_yarn", {"factor": (0, 1e9)})
        if not self.factor:
            _check_unused(self, "rope_yarn", key="factor", rule="YaRN has a factor", fix="rope_yarn.factor = 4.0")
            return
        check_ranges(
            self,
            "model.rope_yarn",
            {"factor": (1, 1e9), "seq": (1, 1e9), "beta_fast": (1e-6, 1e9), "beta_slow": (1e-6, 1e9)}
            | {"attention_factor": (0, 1e6)},
        )
        if self.beta_fast < self.beta_slow:
            raise refuse(
                f"rope_yarn.beta_fast = {self.beta_fast}, beta_slow = {self.beta_slow}",
                rule="fast pairs turn more often than slow ones",
                fix="beta_fast = 32.0, beta_slow = 1.0",
            )

    @property
    def magnitude(self) -> float:
        """Factor of the rotated queries and keys."""
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def ramp(self, dims: int, base: float) -> tuple[float, float]:
        """Returns the pairs of `dims` rotary dims where the interpolation begins and ends."""
        slowness = [
            dims * math.log(self.seq / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        ]
        first, last = (math.floor(slowness[0]), math.ceil(slowness[1])) if self.truncate else slowness
        first, last = max(first, 0), min(last, dims - 1)
        return first, last + 0.001 * (first == last)


@dataclass(frozen=True, kw_only=True)
class LongRopeConfig(Keywords):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each pair has its own factor, another one in long sequences.

    A forward pass takes the long factors if its sequences are longer than `seq`; decoding takes them if its KV cache
    has more than `seq` positions, for all of its tokens.

    Attributes:
      seq: The original context length (original_max_position_embeddings); 0 for no LongRoPE.
      short_factors: Factor of each pair in sequences of at most `seq` tokens, by which its frequency is divided.
      long_factors: The same in longer sequences.
      attention_factor: Factor of the rotated queries and keys, of any length; 0 means sqrt(1 + ln(L / seq) / ln(seq))
        of a model whose `seq` is L, or 1 if L is not longer.
    """

    seq: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 0.0

    def __post_init__(self):
        check_ranges(self, "model.longrope", {"seq": (0, 1e9), "attention_factor": (0, 1e6)})
        self._check_lists()
        if not self.seq:
            rule = "LongRoPE has the original context length"
            _check_unused(self, "longrope", key="seq", rule=rule, fix="longrope.seq = 4096")

    def _check_lists(self):
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            is_list = isinstance(values, (list, tuple)) and (values or not self.seq)
            if not is_list or not all(type(value) in (int, float) and 0 < value < 1e9 for value in values):
                raise refuse(
                    f"longrope.{name} = {values!r:.80}",
                    rule="LongRoPE has a factor above 0 for each pair of rotary dims",
                    fix=f"{name} = [1.0, ...], or seq = 0",
                )
            object.__setattr__(self, name, tuple(values))

    def magnitude(self, seq: int) -> float:
        """Factor of the rotated queries and keys of a model for sequences of `seq` tokens."""
        if self.attention_factor:
            return self.attention_factor
        return math.sqrt(1 + math.log(seq / self.seq) / math.log(self.seq)) if seq > self.seq > 1 else 1.0


def _check_unused(config: YarnConfig | LongRopeConfig, name: str, *, key: str, rule: str, fix: str) -> None:
    """Checks that settings without the number that turns the scaling on are the defaults."""
    unused = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
    if unused:
        got = ", ".join(f"{name}.{setting} = {getattr(config, setting)!r:.60}" for setting in unused)
        raise refuse(f"{got} without {name}.{key}", rule=rule, fix=f"{fix}, or no {name}")
