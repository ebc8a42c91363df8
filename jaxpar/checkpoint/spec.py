"""The `[checkpoint]` table: when checkpoints are written, how many are retained, and which one a run starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, how many are retained, and which one a new run starts from.

    Attributes:
      every: Steps between two checkpoints; 0 disables this rule. One is also written at the end, and when a run stops.
      minutes: Age of the latest checkpoint after which another is written; 0 disables this rule.
      keep_last: Number of latest checkpoints to retain.
      keep_best: Number of best checkpoints to retain in addition.
      best: The evaluation metric that compares checkpoints: eval_loss, or eval_ and the name of any other entry that
        the loss returns, such as eval_accuracy.
      best_is: Whether the lowest or the highest value is the best.
      start_from: A run folder, a checkpoint, or a Hugging Face folder of a Llama or GPT-2 (all of it), whose parameters
        a new run is fine-tuned from; "" means none. Optimizer and step begin anew; a run with checkpoints resumes.
      take: The parameters (and statistics, such as BatchNorm's) to take, as patterns of their paths in the job:
        "blocks" matches all paths below it, and * any text. The others are initialized anew.
      rename: Maps a prefix of paths in the checkpoint to the prefix in the job, {"encoder/blocks" = "blocks"}.
      cast: Whether parameters of another dtype in the checkpoint may be taken.
      rules: For a model of your own that starts from a Hugging Face folder, "module:RULES", a dict as for
        `jp.from_huggingface`: path of a parameter to tensor and dims. It is also what the run is exported by.
      skip: With rules, names of tensors that the model does not use; * is any text.
      replicas: How differing replicas resume under another number of them: same (not at all), mean (all from their
        mean), broadcast (all from the first); the last two also let a job without an exchange resume from their model.
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
    rules: str = ""
    skip: tuple[str, ...] = ()
    replicas: Literal["same", "mean", "broadcast"] = "same"

    def __post_init__(self):
        most = 2**31 - 1
        ranges = {"every": (0, most), "minutes": (0.0, 1e6), "keep_last": (1, most), "keep_best": (0, most)}
        check_ranges(self, "checkpoint", ranges)
        for key, default in (("take", ("*",)), ("rename", {}), ("cast", False), ("rules", ""), ("skip", ())):
            if not self.start_from and getattr(self, key) != default:
                raise refuse(
                    f"checkpoint.{key} = {getattr(self, key)!r} without checkpoint.start_from",
                    rule=f"{key} needs start_from",
                    fix=f'start_from = "runs/other", or leave {key} out',
                )
        if self.rules and (self.take != ("*",) or self.rename):
            raise refuse(
                f"checkpoint.rules = {self.rules!r} with take or rename",
                rule="rules say of each parameter which tensor it is, or None for a new one",
                fix="leave take and rename out",
            )
        if self.skip and not self.rules:
            raise refuse(
                f"checkpoint.skip = {[*self.skip]} without checkpoint.rules",
                rule="skip names tensors that rules do not read",
                fix="take = [...] for a part of the parameters",
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
        if blanks := [old for old, new in self.rename.items() if not old.strip("/") or not new.strip("/")]:
            raise refuse(
                f"checkpoint.rename = {dict(self.rename)}",
                rule="rename maps the beginning of a path to another; neither is empty",
                fix=f'rename = {{"{blanks[0] or "encoder/blocks"}" = "blocks"}}',
            )
