"""The best cut of a chain into stages, if the number of replicas of each stage is fixed.

    seconds per minibatch = max(seconds / replicas of each stage, seconds to send over each boundary between stages)

Every device has buffers as large as the parameters of the largest stage. So among the cuts that take at most `TIE`
times the fewest seconds, those whose largest stage has the fewest bytes are chosen, and among these the one that sends
the fewest bytes. Each choice is exact, by dynamic programming over (stage, first layer).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.chips import Chip, Link
from jaxpar.partition.chain import Chain
from jaxpar.partition.objective import sends
from jaxpar.partition.stage_costs import StageCosts
from jaxpar.units import show_bytes

CLOSE = 1 + 1e-9  # tolerance for sums of the same numbers in another order
TIE = 1.02  # cuts that take up to this many times the fewest seconds count as equal: a roofline is no more exact


def cut_seconds(chain: Chain, stages: Sequence[int], replicas: Sequence[int], link: Link) -> float:
    """Returns the seconds per minibatch of a cut.

    Args:
      chain: The layers.
      stages: Number of layers of each stage.
      replicas: Number of devices of each stage.
      link: The link between stages.
    """
    ends = np.cumsum(stages)
    total = np.cumsum([0.0, *chain.seconds])
    computes = (total[ends] - total[ends - np.asarray(stages)]) / np.asarray(replicas)
    sent = sends(np.asarray(chain.crossing)[ends[:-1] - 1], link) if len(ends) > 1 else np.zeros(1)
    return float(max(computes.max(), sent.max()))


def best_cut(chain: Chain, replicas: Sequence[int], link: Link) -> tuple[int, ...]:
    """Returns the number of layers of each stage in the best cut.

    Args:
      chain: The layers.
      replicas: Number of devices of each stage.
      link: The link between stages.

    Raises:
      JaxparError: If there are more stages than layers.
    """
    layers, stages = len(chain.names), len(replicas)
    if stages > layers:
        raise refuse(
            f"{layers} pieces in {stages} stages",
            rule="a stage has one piece at least",
            fix=f"pipe = {layers} at most, or a model divided into more pieces",
        )
    crossing = np.asarray(chain.crossing)
    sent = sends(crossing, link)

    # least[i]: minimum cost of layers i, i + 1, ..., divided among this stage and all later ones
    def search(costs: list[np.ndarray], cut: np.ndarray, combine) -> tuple[np.ndarray, list[np.ndarray]]:
        least, choices = costs[-1][:, -1], []
        for cost in reversed(costs[:-1]):
            rest = combine(cut[:-1], least[1:])  # minimum cost of the later stages, per last layer of this stage
            totals = combine(cost[:, :-1], rest[None, :])
            choice = totals.argmin(axis=1)
            least = np.append(totals[np.arange(layers), choice], np.inf)[:layers]
            choices.append(choice)
        return least, choices[::-1]

    def among(costs: list[np.ndarray], limit: float, of: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.where(cost <= limit, value, np.inf) for cost, value in zip(costs, of, strict=True)]

    computes = [_spans(chain.seconds) / count for count in replicas]
    seconds, _ = search(computes, sent, np.maximum)
    within = seconds[0] * TIE
    open_cuts = np.where(sent <= within, 0.0, np.inf)
    parameters = among(computes, within, [_spans(chain.parameters)] * stages)
    fullest, _ = search(parameters, open_cuts, np.maximum)
    allowed = among(parameters, fullest[0] * CLOSE, [np.zeros((layers, layers))] * stages)
    _, choices = search(allowed, open_cuts + crossing, np.add)
    ends = []
    for choice in choices:
        ends.append(int(choice[ends[-1] if ends else 0]) + 1)
    return tuple(int(n) for n in np.diff([0, *ends, layers]))


def _spans(of_layers: Sequence[float]) -> np.ndarray:
    """Returns the sums over the layers from `first` to `last`; shape [first, last], infinite where last < first."""
    total = np.cumsum([0.0, *of_layers])
    spans = np.triu(total[None, 1:] - total[:-1, None])
    spans[np.tril_indices(len(of_layers), -1)] = np.inf
    return spans


@dataclass(frozen=True)
class BestCut:
    """The best cut of a traced model.

    Attributes:
      stages: Number of pieces of each part.
      replicas: Number of devices of each part.
      chain: The pieces.
      chip: The chip whose rates give the seconds.
      costs: Predicted costs of the schedule with this cut, if a schedule is known.
    """

    stages: tuple[int, ...]
    replicas: tuple[int, ...]
    chain: Chain
    chip: Chip
    costs: StageCosts | None = None

    def __str__(self) -> str:
        share = sum(self.chain.seconds) / sum(self.replicas)
        most = cut_seconds(self.chain, self.stages, self.replicas, _within_a_machine(self.chip))
        sent = sum(self.chain.crossing[end - 1] for end in [*accumulate(self.stages)][:-1])
        return (
            f"stages={self.stages} of {len(self.chain.names)} pieces, chosen by a roofline of {self.chip.name}: the "
            f"slowest stage takes {most / share:.2f} times the mean; {show_bytes(sent)} of a microbatch pass between "
            "stages, one way" + (f"; {self.costs}" if self.costs else "")
        )


def find_stages(chain: Chain, replicas: Sequence[int], chip: Chip) -> BestCut:
    """Finds the best cut, over the links between chips of one machine.

    Args:
      chain: The pieces of a traced model.
      replicas: Number of devices of each part.
      chip: The chip.

    Raises:
      JaxparError: If there are more parts than pieces.
    """
    return BestCut(best_cut(chain, replicas, _within_a_machine(chip)), tuple(replicas), chain, chip)


def _within_a_machine(chip: Chip) -> Link:
    return Link(latency=0.0, bandwidth=chip.nvlink)
