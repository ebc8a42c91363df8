"""The settings of a mixture of experts."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Keywords):
    """A mixture of experts in place of each feed-forward layer.

    Mixtral has count 8 and per_token 2, Qwen3-MoE 128 and 8; DeepSeek-V3 has 256 and 8, scores sigmoid, shared 1,
    groups 8, group_limit 4, scale 2.5, balance_rate 0.001, dense_layers 3; Llama 4 Maverick has 128 and 1, every 2.

    Attributes:
      count: Number of experts; 0 for a dense feed-forward layer.
      dense_layers: First layers without experts (first_k_dense_replace in DeepSeek-V3); the decoder's `hidden` is the
        width of their feed-forward.
      every: Every n-th layer of the decoder has experts, the others are dense: of layers 0, 1, 2, ... layer i has
        experts if (i + 1) % every = 0 and i >= dense_layers (decoder_sparse_step in Qwen3-MoE).
      per_token: Experts that compute a token.
      hidden: Width of an expert; 0 means that of the dense feed-forward layer.
      shared: Experts that compute every token, as one of `shared` times the width (DeepSeekMoE, arXiv:2401.06066).
      scores: Scores of experts: softmax over all experts, or a sigmoid of each (DeepSeek-V3, arXiv:2412.19437).
      normalize: Whether the weights of a token's experts are divided by their sum.
      scale: Factor of the weights.
      groups: Groups of experts of equal number, of which a token takes experts of the best only; 0 for no groups.
      group_limit: Number of groups of which a token takes experts. The score of a group is the sum of its two best.
      dispatch: Where tokens wait for experts: in slots of each expert (capacity), or in buffers that the experts of a
        device share (dropless, after arXiv:2211.15841), which overflow only if these together get too many.
      capacity: Tokens of a row that an expert takes, over the mean; 0 for all.
      imbalance: Of dropless, tokens of a row that a buffer takes, over the mean.
      buffers: Of dropless, number of buffers, see `jp.mixture`; 0 means the largest power of 2 up to 8 that divides
        `count`.
      overflow: What becomes of a choice whose expert is full: drop it, spill it to the token's next best expert, or
        refuse it: the loss of the step is NaN, which ends the run, and `refused` is the share of such choices.
      balance: Weight of the balance loss, count x sum over experts of (share of choices x mean score), as in Switch
        Transformers (arXiv:2101.03961) but of each row.
      router_z: Weight of the router's z-loss, the mean of logsumexp(logits) squared (ST-MoE, arXiv:2202.08906).
      balance_rate: Change per step of the bias that balances the load without a loss (arXiv:2408.15664); 0 for none.
    """

    count: int = 0
    dense_layers: int = 0
    every: int = 1
    per_token: int = 2
    hidden: int = 0
    shared: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 0
    group_limit: int = 0
    dispatch: Literal["capacity", "dropless"] = "capacity"
    capacity: float = 1.25
    imbalance: float = 2.0
    buffers: int = 0
    overflow: Literal["drop", "spill", "refuse"] = "drop"
    balance: float = 0.01
    router_z: float = 0.0
    balance_rate: float = 0.0

    def __post_init__(self):
        high = 2**31 - 1
        check_ranges(
            self,
            "model.experts",
            dict.fromkeys(("count", "dense_layers", "hidden", "shared", "groups", "group_limit", "buffers"), (0, high))
            | {
                "every": (1, high),
                "per_token": (1, high),
                "scale": (0, 1e6),
                "capacity": (0, high),
                "imbalance": (1, high),
                "balance": (0, 1e6),
            }
            | {"router_z": (0, 1e6), "balance_rate": (0, 1)},
        )
        if not self.count:
            return
        if self.per_token > self.count:
            raise refuse(
                f"experts.per_token = {self.per_token} of experts.count = {self.count}",
                rule="a token chooses different experts",
                fix=f"per_token = {self.count} or less",
            )
        if self.dispatch == "dropless" and (self.overflow == "drop" or (self.buffers and self.count % self.buffers)):
            raise refuse(
                f'experts.dispatch = "dropless", overflow = {self.overflow!r}, buffers = {self.buffers} '
                f"of experts.count = {self.count}",
                rule="dropless spills or refuses what exceeds its bound, and equal numbers of experts share buffers",
                fix=f'overflow = "spill", buffers = {self.buffers and nearest_divisor(self.count, self.buffers)}',
            )
        if self.groups and self.count % self.groups:
            raise refuse(
                f"experts.count = {self.count}, groups = {self.groups}",
                rule="groups have the same number of experts",
                fix=f"groups = {nearest_divisor(self.count, self.groups) or 1}",
            )
        if not 0 <= self.group_limit <= self.groups or self._available < self.per_token:
            raise refuse(
                f"experts.group_limit = {self.group_limit} of groups = {self.groups}, per_token = {self.per_token}",
                rule="a token takes its experts of at most `groups` groups, which have at least per_token experts",
                fix=f"group_limit = {min(self.groups, -(-self.per_token * (self.groups or 1) // self.count))}"
                if self.groups
                else "group_limit = 0 without groups",
            )

    def layers_with_experts(self, layers: int) -> range:
        """The numbers of the layers with experts, of a decoder of `layers` layers."""
        start = -(-(self.dense_layers + 1) // self.every) * self.every - 1
        return range(start, layers, self.every) if self.count else range(0)

    @property
    def bound(self) -> dict[str, Any]:
        """The keywords of `jp.mixture` for the numbers of tokens that experts take."""
        if self.dispatch == "dropless":
            return {"imbalance": self.imbalance, "buffers": self.buffers}
        return {"capacity": self.capacity} if self.capacity else {}

    @property
    def choices(self) -> int:
        """Experts that a token names: those that compute it, and as many spare ones if choices spill."""
        return min(self._available, self.per_token * (1 + (self.overflow == "spill")))

    @property
    def _available(self) -> int:
        """Experts of the groups that a token may take."""
        return self.count // self.groups * self.group_limit if self.groups else self.count
