"""The checkpoints of a job: when they are written, which are kept, and where parameters come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, which are kept, and which one a new run starts from.

    Attributes:
      every: Steps between two; 0 counts no steps. One is written at the end, and where a run is stopped.
      minutes: Age at which the latest is too old, so that another is written besides; 0 for none.
      keep_last: How many of the latest stay.
      keep_best: How many of the best stay besides.
      best: The metric of an evaluation by which they are compared: eval_loss, or eval_ and the name of any other entry
        that the loss returns, such as eval_accuracy.
      best_is: Whether its lowest or its highest value is the best.
      start_from: A run folder, one checkpoint, or a Llama or GPT-2 folder of Hugging Face's (taken whole), whose
        parameters a new run begins with, to tune them further; "" means new parameters. The optimizer and the step
        begin anew; a run that has checkpoints goes on from its own.
      take: Which parameters (and statistics, such as BatchNorm's) it takes, by their paths in the job: "blocks" is
        all below it, * any text. The others are new.
      rename: Beginning of a path in the checkpoint to what it is in the job, {"encoder/blocks" = "blocks"}.
      cast: Whether parameters may be taken that have another dtype in the checkpoint.
      replicas: How a run whose replicas differ goes on with another number of them: same (not at all), mean (all with
        their mean), broadcast (all with the first); with either also without an exchange, from the model of theirs.
    """

    every: int = 0
    minutes: float = 30.0
    keep_last: int = 2
    keep_best: int = 0
    best: str = "eval_loss"
    best_is: Literal["lowest", "highest"] = "lowest"
    start_from: str = ""
    take: tuple[str, ...] = ("*",)
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: bool = False
    replicas: Literal["same", "mean", "broadcast"] = "same"

    def __post_init__(self):
        most = 2**31 - 1
        ranges = {"every": (0, most), "minutes": (0.0, 1e6), "keep_last": (1, most), "keep_best": (0, most)}
        check_ranges(self, "checkpoint", ranges)
        for key, usual in (("take", ("*",)), ("rename", {}), ("cast", False)):
            if not self.start_from and getattr(self, key) != usual:
                raise refuse(
                    f"checkpoint.{key} = {getattr(self, key)!r} without checkpoint.start_from",
                    rule=f"{key} needs start_from",
                    fix=f'start_from = "runs/other", or leave {key} out',
                )
        if self.replicas not in ("same", "mean", "broadcast"):
            raise refuse(
                f"checkpoint.replicas = {self.replicas!r:.60}",
                rule="replicas go on as the same number, their mean, or a broadcast of the first",
                fix='replicas = "mean"',
            )
        if not self.take:
            raise refuse(
                "checkpoint.take = []",
                rule="checkpoint.take has at least one pattern",
                fix='take = ["blocks/*"], or leave start_from out',
            )
        if wrong := [old for old, new in self.rename.items() if not old.strip("/") or not new.strip("/")]:
            raise refuse(
                f"checkpoint.rename = {dict(self.rename)}",
                rule="rename maps the beginning of a path to another; neither is empty",
                fix=f'rename = {{"{wrong[0] or "encoder/blocks"}" = "blocks"}}',
            )
