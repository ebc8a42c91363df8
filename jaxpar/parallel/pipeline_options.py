"""The options of the axis `pipe`, which puts consecutive layers on different devices.

Between steps a stage stores a contiguous range of layers, so that a checkpoint depends neither on the schedule nor on
the depth of the pipeline.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jaxpar.errors import Keywords

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule

# Bytes per parameter of embedding or head while a table runs: a bfloat16 copy to compute with, and the float32 sum of
# its gradients.
HELD = 2 + 4

# The least bytes that `head="auto"` must free on each device. With both ends spread, five all-reduces of [tokens, dim]
# go over `pipe` per microbatch, and each tick with an end is several programs. 256 MiB of a head and an embedding are
# 22 million parameters of the head fewer on each device: their products take 134 MFLOP per token, 0.27 us at 500
# TFLOP/s. At a width of 4,096 the messages take 80 kB per token, 0.22 us over NVLink. So from 256 MiB on a step is no
# slower inside of a node; over a network it may be, by some percent. Below that, spreading frees less than one
# three-hundredth of a GPU's memory.
LEAST = 256 * 2**20

UNNAMED, FOUND = "auto", "found"
PHASED = "1f1b_phased"


@dataclass(frozen=True, kw_only=True, repr=False)
class Pipeline(Keywords):
    """Settings of the axis `pipe`.

    Attributes:
      schedule: A name that `jaxpar schedule --compare` lists, or the path of a CSV table. A schedule that mixes kinds
        of ops in a tick is refused once it is compiled, if the layers would wait there for other stages. auto:
        1f1b_phased; on simulated devices 1f1b where possible, as it computes less there; `Layout.notes` and `check` say
        which and why. Both make the same updates, up to rounding.
      microbatches: Number of parts of the batch, which pass the stages in sequence; 0 means twice the stages.
      chunks: Model chunks on each stage, for interleaved schedules; 0 means the fewest that the schedule supports.
      layers: Layers of each stage, if stages have different numbers: (16, 16, 16, 15). Every tick takes as long as the
        stage with the most layers, and while the table runs every stage holds as many layers as that stage.
      stages: Number of pieces of each stage (of each chunk, in order of depth), (3, 5, 2), of a model that gives
        `jp.pipelined` a list of any callables; or found, which cuts any model so that the slowest stage takes least.
      replicas: Number of devices of each of `stages`, (15, 1), which sum to `pipe`; () means one each.
      stack: Start of the paths of the layers' parameters, "text/blocks", for a model with several stacks or lists whose
        dims have no names; "" selects the stack or list with the most bytes.
      keep: What a forward saves for its backward: inputs (the input of each stage, which is recomputed from it) or
        residuals (what the backward reads, chosen by train.remat; elementwise ops are recomputed).
      gather: When `zero=3` gathers a layer over `fsdp`. step: once per step, and its gradient is reduced once; a stage
        holds its layers whole. tick: whenever the layer runs, forward and backward, in every tick, and its gradient is
        reduced there, in float32; a stage holds one whole layer, and shards of its layers and of their gradients.
      head: Where both ends run: the embedding, and everything after the layers (head and loss). last: embedding on the
        first stage and head on the last, while others wait, and every stage holds both whole. spread: on all stages,
        `vocab` split over pipe x tensor, for five all-reduces of a microbatch's activations between layers. auto:
        spread if possible and if it frees at least 256 MiB on each device, else last; `Layout.notes` and `check` say
        which and why.
      weights: When the weights change. flush: once per step, by the gradient of the whole batch. The others update
        after every microbatch, in the middle of the schedule, as PipeDream does: stash (each backward has the weights
        of its forward), vertical (all stages use the weights that the first had when the microbatch came in), 2bw (one
        update per as many microbatches as stages, one late), none (no weight versions: not the gradient of any
        function). A step then makes several updates (`Pipeline.updates`), all with the step's learning rate:
        schedules, a job's and those that optax counts (`learning_rate=schedule`, `inject_hyperparams`), count steps, as
        with flush. Any other counter in your optax chain counts updates.
    """

    schedule: str = UNNAMED
    microbatches: int = 0
    chunks: int = 0
    layers: tuple[int, ...] = ()
    stages: tuple[int, ...] | Literal["found"] = ()
    replicas: tuple[int, ...] = ()
    stack: str = ""
    keep: Literal["inputs", "residuals"] = "inputs"
    gather: Literal["step", "tick"] = "step"
    head: Literal["auto", "last", "spread"] = "auto"
    weights: Literal["flush", "stash", "vertical", "2bw", "none"] = "flush"

    @property
    def group(self) -> int:
        """Number of microbatches that a tick handles: 1, unless stages have replicas."""
        return math.lcm(*self.replicas)

    def table(self, devices: int) -> "Schedule":
        """Returns the schedule table of groups of microbatches, for a size of `pipe`; `auto` is the phased one.

        Raises:
          JaxparError: If the schedule does not exist, or does not support these numbers.
        """
        from jaxpar.pipeline.tables import csv, library

        stages, microbatches = len(self.replicas) or devices, self.microbatches // self.group
        if not str(self.schedule).endswith(".csv"):
            count = microbatches or 2 * stages
            name = PHASED if self.schedule == UNNAMED else self.schedule
            table = library.schedule(name, stages=stages, microbatches=count, chunks=self.chunks or None)
        else:
            table = csv.read_table(self.schedule, stages, microbatches, self.chunks)
        return replace(table, replicas=tuple(self.replicas)) if self.replicas else table

    def updates(self, schedule: "Schedule") -> int:
        """Returns the number of updates in a step: one with a flush, else one per microbatch (2bw: per P of them)."""
        per_update = {"flush": schedule.microbatches, "2bw": schedule.stages}.get(self.weights, 1)
        return schedule.microbatches // per_update
