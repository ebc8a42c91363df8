"""The declaration of a user: sizes of axes, and what the `fsdp` axis shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.errors import Problem
from jaxpar.mesh.axes import TRAINED
from jaxpar.parallel.pipe import Pipeline

Axes = str | tuple[str, ...] | None

ZERO_SHARDS = (
    "nothing",
    "optimizer state, and parameters between steps",
    "optimizer state, gradients, and parameters between steps",
    "optimizer state, gradients and parameters",
)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The parallelism of a training job. Sizes multiply to the number of devices.

    Attributes:
      pipe: Stages of a pipeline, each with consecutive layers of the model's stack.
      data: Replicas of the training state, each with other examples (DDP; with `fsdp`, HSDP).
      fsdp: Devices that share one training state, each with other examples.
      context: Devices that share every sequence, each with a piece of its tokens: keys and values are gathered in
        attention (context parallelism, as of Llama 3: arXiv:2407.21783, section 3.3.2).
      tensor: Devices that share every large matrix (Megatron tensor parallelism).
      zero: What `fsdp` shards: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
        (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054). None means 3 where fsdp is not 1. With 1 and 2 parameters are
        shards between steps, and gathered once a step, in the dtype that it computes in. In a
        pipeline 1 and 3 add up the gradients of a step whole and scatter the sum once (but see `Pipeline.gather`). 2
        scatters in every tick that makes gradients, M + P - 1 of them, or all of a table that mixes kinds, and adds up
        shards: less memory, more traffic.
      sequence: Whether the activations between the matrices are split along `seq` over `tensor`
        (Korthikanti et al. 2022, arXiv:2205.05198).
      pipeline: How the stages take turns.
      rules: Name of a dim to mesh axis (or axes, or None), before jaxpar's own names.
      paths: End of a parameter's path (regular expression) to the names of its trailing dims.
      replicate_above: Bytes up to which a parameter may be whole on every device of the axis
        that should shard it; a larger one is refused.

    One size may be -1: it becomes what the others leave over.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    zero: int | None = None
    sequence: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)
    rules: Mapping[str, Axes] = field(default_factory=dict)
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replicate_above: int = 4 * 2**20

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, as declared."""
        return {axis: getattr(self, axis) for axis in TRAINED}

    @property
    def stage(self) -> int:
        """The ZeRO stage: what `fsdp` shards; 0 where there is no such axis."""
        if self.fsdp == 1:
            return 0
        return 3 if self.zero is None else self.zero

    def problems(self) -> list[Problem]:
        """Returns what is wrong with the declaration on its own, before any model or device."""
        found = []
        if self.zero is not None and (type(self.zero) is not int or not 0 <= self.zero <= 3):
            found.append(
                Problem(
                    f"zero={self.zero!r}",
                    "zero is 0 (nothing), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)",
                    "zero=3",
                )
            )
        elif self.zero and self.fsdp == 1:
            found.append(
                Problem(
                    f"zero={self.zero} with fsdp=1 shards nothing",
                    f"zero={self.zero} shards {ZERO_SHARDS[self.zero]} over the axis `fsdp`",
                    "fsdp=2 or more (fsdp=-1 takes what is left), or leave zero out",
                )
            )
        if not isinstance(self.sequence, bool):
            found.append(Problem(f"sequence={self.sequence!r}", "sequence is True or False", "sequence=True"))
        elif self.sequence and self.tensor == 1:
            found.append(
                Problem(
                    "sequence=True with tensor=1 does nothing",
                    "sequence parallelism splits activations over the axis `tensor`",
                    "tensor=2 or more, or sequence=False",
                )
            )
        if type(self.replicate_above) is not int or self.replicate_above < 0:
            found.append(
                Problem(
                    f"replicate_above={self.replicate_above!r}",
                    "replicate_above is a number of bytes",
                    "replicate_above=4 * 2**20",
                )
            )
        if isinstance(self.pipeline, Pipeline):
            found += self.pipeline.problems(self.pipe)
            if self.pipeline.gather == "tick" and self.stage < 3:
                found.append(
                    Problem(
                        f'gather="tick" with fsdp={self.fsdp}, zero={self.stage}',
                        "it says when zero=3 gathers the layers that `fsdp` shards",
                        'fsdp=2 or more and zero=3, or gather="step"',
                    )
                )
            if self.pipeline.head == "spread" and self.stage == 2:
                found.append(
                    Problem(
                        f'head="spread" with fsdp={self.fsdp}, zero=2',
                        "zero=2 adds up shards of gradients, and those of a head that is spread are added up whole",
                        'zero=1 or zero=3, or head="last"',
                    )
                )
        else:
            found.append(
                Problem(f"pipeline={self.pipeline!r:.60}", "a Pipeline", 'jp.Pipeline(schedule="1f1b_phased")')
            )
        for key, example in (("rules", '{"mlp": "tensor"}'), ("paths", '{"up/kernel": ("embed", "mlp")}')):
            found += _shape_problems(key, getattr(self, key), example)
        return found


def _shape_problems(key: str, given: object, example: str) -> list[Problem]:
    """Returns what is no name, or no tuple of names, in `rules` or `paths`."""
    rule = (
        "rules map the name of a dim to a mesh axis, a tuple of them, or None"
        if key == "rules"
        else "paths map the end of a path to a tuple of names of dims"
    )
    if not isinstance(given, Mapping):
        return [Problem(f"{key}={given!r}", rule, f"{key}={example}")]

    def good(value: object) -> bool:
        alone = value is None or isinstance(value, str)
        each = isinstance(value, (tuple, list)) and all(
            isinstance(v, str) or (v is None and key == "paths") for v in value
        )
        return each or (alone and key == "rules")

    return [
        Problem(f"{key}={{{name!r}: {value!r}}}", rule, f"{key}={example}")
        for name, value in given.items()
        if not isinstance(name, str) or not good(value)
    ]
