"""Layers that all cost the same, dealt to stages of which the first also embeds and the last also has the head.

    8 layers, 4 stages, a head of 1.3 layers      2 2 2 2   fullest 3.3 layers      3 2 2 1   fullest 3.0

That is what a stage has to do. In one SPMD program every stage runs as many layers as the fullest, so there a head is
better spread over the stages (`head="spread"`), and unequal numbers serve only where the layers do not divide.
"""

from dataclasses import dataclass

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class Split:
    """Layers of each stage, and what follows. All costs are in layers, modelled.

    Attributes:
      layers: Of each stage, as `Pipeline.layers` takes them.
      head: What the head and the loss cost, on the last stage.
      embedding: What the embedding costs, on the first.
    """

    layers: tuple[int, ...]
    head: float = 0.0
    embedding: float = 0.0

    @property
    def work(self) -> tuple[float, ...]:
        """The work of each stage for a microbatch."""
        ends = [0.0] * len(self.layers)
        ends[0] += self.embedding
        ends[-1] += self.head
        return tuple(layers + end for layers, end in zip(self.layers, ends, strict=True))

    @property
    def share(self) -> float:
        """The fullest stage's part of all work; 1 / stages at best."""
        return max(self.work) / sum(self.work)

    @property
    def tick(self) -> float:
        """The time of a tick in one SPMD program: the layers of the fullest stage, and the longer of the ends."""
        ends = (self.embedding, self.head) if len(self.layers) > 1 else (self.embedding + self.head,)
        return max(self.layers) + max(ends)

    @property
    def even(self) -> "Split":
        """The same with as many layers on each stage, or one more on the first ones."""
        each, more = divmod(sum(self.layers), len(self.layers))
        layers = tuple(each + (stage < more) for stage in range(len(self.layers)))
        return Split(layers=layers, head=self.head, embedding=self.embedding)

    def __str__(self) -> str:
        even = self.even
        return (
            f"layers = {self.layers}: the fullest stage has {self.share:.1%} of the work, {even.share:.1%} if even "
            f"{even.layers}; a tick of one SPMD program takes {self.tick:.3g} layers, {even.tick:.3g} if even; modelled"
        )


def split(layers: int, stages: int, *, head: float = 0.0, embedding: float = 0.0) -> Split:
    """Returns the contiguous split whose fullest stage has least to do, each stage having a layer at least.

    Every further layer goes to the stage that then has least to do, which is optimal where all layers cost the same.

    Args:
      layers: Of the model.
      stages: Of the pipeline.
      head: What the head and the loss cost, in layers: 1.3 for as much as 1.3 layers; 0 where they are spread.
      embedding: What the embedding costs, in layers.

    Raises:
      JaxparError: If there are more stages than layers, or a cost is negative.

    >>> split(8, 4, head=1.3).layers
    (3, 2, 2, 1)
    """
    if type(layers) is not int or type(stages) is not int or not 1 <= stages <= layers:
        raise refuse(f"{layers} layers on {stages} stages", rule="each stage has a layer at least", fix="stages = 1")
    started = Split(layers=(1,) * stages, head=head, embedding=embedding)
    check_ranges(started, "", {"head": (0.0, 1e9), "embedding": (0.0, 1e9)})
    work, counts = list(started.work), [1] * stages
    for _ in range(layers - stages):
        least = work.index(min(work))
        work[least] += 1
        counts[least] += 1
    found = Split(layers=tuple(counts), head=head, embedding=embedding)
    return found if found.share < found.even.share - 1e-12 else found.even
