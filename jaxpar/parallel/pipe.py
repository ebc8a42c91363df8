"""The axis `pipe`: consecutive layers on different devices, microbatches one after the other.

Between steps a stage stores a contiguous piece of the layers, in their natural order, so that a checkpoint knows
neither the schedule nor the depth of the pipeline.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxpar.errors import Keywords, Problem, refuse
from jaxpar.pipeline.tables import library
from jaxpar.pipeline.tables.csv import from_csv
from jaxpar.pipeline.tables.schedule import Schedule

# Bytes of a parameter of embedding or head while a table runs: a copy to compute with, in bfloat16, and the float32 sum
# of its gradients.
HELD = 2 + 4

# What `head="auto"` asks to be freed on each device. With both ends spread, five all-reduces of [tokens, dim] go over
# `pipe` per microbatch, and each tick with an end is several programs. 256 MiB of a head and an embedding are 22
# million parameters less of the head on each device: their products take 134 MFLOP of every token, 0.27 us at 500
# TFLOP/s. The messages of a width of 4,096 take 80 kB of every token, 0.22 us over NVLink. So from there on a step is
# no slower inside of a node; over a network it may be, by some percent. With less, the memory that is freed is a three-
# hundredth of a GPU's.
LEAST = 256 * 2**20

UNNAMED = "auto"
PHASED = "1f1b_phased"


@dataclass(frozen=True, kw_only=True)
class Pipeline(Keywords):
    """Settings of the axis `pipe`.

    Attributes:
      schedule: A name that `jaxpar schedule --compare` lists, or a CSV file with a table of your own. One that mixes
        kinds of ops in a tick is refused once it is compiled, if the layers would wait there for other stages. auto:
        1f1b_phased, and on simulated devices 1f1b, which computes less there, where that can be; `Layout.notes` and
        `check` say which and why. Both make the same updates, up to rounding.
      microbatches: Pieces of the batch that go through the stages one after the other; 0 means twice the stages.
      chunks: Parts of the model on each stage, where a schedule interleaves; 0 means the fewest that it takes.
      layers: Layers of each stage, if not all stages have as many: (16, 16, 16, 15). Every tick takes as long as the
        fullest stage, and every stage holds as many layers as that one while the table runs.
      stack: Where the paths of the layers' parameters begin, "text/blocks", of a model with several stacks or lists
        whose dims have no names; "": those with most bytes.
      keep: What a forward keeps for its backward: inputs (each stage's input, computed again from there) or
        residuals (what the backward reads, chosen by train.remat; elementwise ops it computes again).
      gather: When `zero=3` gathers a layer over `fsdp`. step: once per step, and its gradient is reduced once; a stage
        holds its layers whole. tick: where it runs, again in every tick and again for its backward, and its gradient is
        reduced there, in float32 too; a stage holds a shard of them and of their gradients, and one whole layer.
      head: Where both ends run, the embedding, and what follows the layers, head and loss. last: embedding on the first
        stage and head on the last, while others wait, and every stage holds both whole. spread: on all of them, `vocab`
        split over pipe x tensor, for five all-reduces of a microbatch's stream between layers. auto: spread where that
        can be and frees at least 256 MiB on each device, else last; `Layout.notes` and `check` say which and why.
      weights: When they change. flush: once per step, by the gradient of the whole batch. Otherwise after every
        microbatch, in the middle of the schedule, as PipeDream does: stash (each backward has the weights of its
        forward), vertical (all stages have those that the first had when the microbatch came in), 2bw (one update per
        as many microbatches as stages, one late), none (no care taken: not the gradient of any function). Several
        updates make a step then (`Layout.updates_per_step`), and all of them have the step's learning rate: schedules,
        a job's and those that optax counts (`learning_rate=schedule`, `inject_hyperparams`), count steps, as with a
        flush. What else a chain of your own counts, counts updates.
    """

    schedule: str = UNNAMED
    microbatches: int = 0
    chunks: int = 0
    layers: tuple[int, ...] = ()
    stack: str = ""
    keep: Literal["inputs", "residuals"] = "inputs"
    gather: Literal["step", "tick"] = "step"
    head: Literal["auto", "last", "spread"] = "auto"
    weights: Literal["flush", "stash", "vertical", "2bw", "none"] = "flush"

    def table(self, stages: int) -> Schedule:
        """Returns the table for so many stages, of `auto` the phased one.

        Raises:
          JaxparError: If there is no such schedule, or not for these numbers.
        """
        if not str(self.schedule).endswith(".csv"):
            count = self.microbatches or 2 * stages
            name = PHASED if self.schedule == UNNAMED else self.schedule
            return library.schedule(name, stages=stages, microbatches=count, chunks=self.chunks or None)
        try:
            made = from_csv(Path(self.schedule).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise refuse(
                f"parallel.pipeline.schedule = {self.schedule!r}: {getattr(error, 'strerror', error)}",
                rule="a schedule is a name of the library, or a CSV file",
                fix='schedule = "1f1b_phased"; `jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv F` writes one',
            ) from error
        for key, given, own in (
            ("pipe", stages, made.stages),
            ("microbatches", self.microbatches or made.microbatches, made.microbatches),
            ("chunks", self.chunks or made.chunks, made.chunks),
        ):
            if given != own:
                raise refuse(
                    f"{key} = {given}, the table in {self.schedule} has {own}",
                    rule="a CSV schedule fixes its numbers of stages, microbatches and chunks: the job has the same",
                    fix=f"{key} = {own}",
                )
        return made

    def problems(self, stages: int) -> list[Problem]:
        """Returns what is wrong on its own."""
        found = []
        if stages == 1 and self != Pipeline():
            found.append(
                Problem(
                    "a pipeline with pipe=1",
                    "[parallel.pipeline] says how the axis `pipe` is run",
                    "pipe=2 or more, or leave the pipeline out",
                )
            )
        for key in ("microbatches", "chunks"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 0:
                found.append(Problem(f"{key}={getattr(self, key)!r}", f"{key} is a whole number, or 0", f"{key}=0"))
        if not isinstance(self.layers, tuple | list) or any(type(n) is not int or n < 1 for n in self.layers):
            found.append(Problem(f"layers={self.layers!r}", "the layers of each stage, at least one", "layers=()"))
        elif self.layers and stages > 1 and len(self.layers) != stages:
            found.append(
                Problem(
                    f"layers={tuple(self.layers)} for pipe={stages}",
                    "there is one number of layers for each stage",
                    f"{stages} numbers, or layers=() for as many on each",
                )
            )
        if not isinstance(self.stack, str):
            found.append(Problem(f"stack={self.stack!r:.60}", "stack is the start of a path", 'stack="text/blocks"'))
        for key, known in (
            ("keep", ("inputs", "residuals")),
            ("gather", ("step", "tick")),
            ("head", ("auto", "last", "spread")),
            ("weights", ("flush", "stash", "vertical", "2bw", "none")),
        ):
            if getattr(self, key) not in known:
                found.append(
                    Problem(f"{key}={getattr(self, key)!r}", f"{key} is {', '.join(known)}", f'{key}="{known[0]}"')
                )
        if self.head == "spread" and (self.weights != "flush" or self.gather == "tick"):
            found.append(
                Problem(
                    f'head="spread" with weights={self.weights!r}, gather={self.gather!r}',
                    'a head is spread where weights="flush" and gather="step"',
                    'head="last"',
                )
            )
        return found
