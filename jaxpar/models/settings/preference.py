"""The settings of the loss on preferences (DPO, Rafailov et al. 2023, arXiv:2305.18290)."""

from dataclasses import dataclass

from jaxpar.errors import Keywords, check_ranges


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
