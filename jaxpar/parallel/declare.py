"""The declaration of a user: sizes of axes, and what the `fsdp` axis shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpar.errors import Keywords, Problem, nearest
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import Exchange
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.parallel.pipe import Pipeline

Axes = str | tuple[str, ...] | None
DECLARED = ("pipe", "data", "fsdp", "context", "tensor")  # axes with a field of their own

ZERO_OVER = ("fsdp", "fsdp x context")

ZERO_SHARDS = (
    "nothing",
    "optimizer state, and parameters between steps",
    "optimizer state, gradients, and parameters between steps",
    "optimizer state, gradients and parameters",
)


@dataclass(frozen=True, kw_only=True)
class Parallel(Keywords):
    """The parallelism of a training job. Sizes multiply to the number of devices.

    Attributes:
      pipe: Stages of a pipeline, each with consecutive layers of the model's stack.
      data: Replicas of the training state, each with other examples (DDP; with `fsdp`, HSDP).
      fsdp: Devices that share one training state, each with other examples.
      context: Devices that share every sequence, each with a piece of its tokens (context parallelism).
      context_by: How attention brings queries and keys of all pieces together. gather: every device gathers all keys
        and values (Llama 3, arXiv:2407.21783, section 3.3.2), the least that is sent at once, and in 16 bits scores
        [pieces, seq] that are kept: for short rows. ring: keys and values go around (arXiv:2310.01889), no scores are
        kept. ulysses: devices exchange heads for tokens (arXiv:2309.14509). auto: the fastest by a plan's
        formulas of those whose scores of a layer fit the chip, chosen and said as a step is traced.
      ulysses: Of the devices of a ring, those that exchange heads; the rest rotate keys (arXiv:2405.07719).
      context_kernel: What runs a device's part of attention where pieces travel (ring, ulysses). auto: cuDNN's fused
        kernel on GPUs in 16 bits where it takes the heads and masks, else blocks of plain JAX; `Step.forms` and reports
        say which, and why. cudnn: the kernel, or an error; context_by="auto" then takes a form that has it. plain:
        blocks of plain JAX.
      tensor: Devices that share every large matrix (Megatron tensor parallelism).
      zero: What `fsdp` shards: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
        (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054). None means 3 where fsdp is not 1. With 1 and 2 parameters are
        shards between steps, and gathered once a step, in the dtype that it computes in. In a
        pipeline 1 and 3 add up the gradients of a step whole and scatter the sum once (but see `Pipeline.gather`). 2
        scatters in every tick that makes gradients, M + P - 1 of them, or all of a table that mixes kinds, and adds up
        shards: less memory, more traffic.
      zero_over: Devices that share the training state as `zero` says: "fsdp", or "fsdp x context". The devices of
        `context` see pieces of the same sequences and have the same parameters, so with rows that are too few for
        `fsdp` they shard the state instead, or besides, as FSDP does over context parallelism in torchtitan.
      sequence: Whether the activations between the matrices are split along `seq` over `tensor`
        (Korthikanti et al. 2022, arXiv:2205.05198).
      pipeline: How the stages take turns.
      how: Axis to the way in which its technique runs, where it has several: {"context": "gather"}.
      exchange: How the replicas over `data` agree; None is by all-reduces in every step.
      axes: Sizes of further axes, of techniques that are added to jaxpar's own: {"toy": 2}.
      rules: Name of a dim, of parameters or activations, to mesh axis (or axes, or None), before jaxpar's own names. A
        name that the model does not use is refused once its step is traced.
      paths: End of a parameter's path (regular expression) to the names of its trailing dims.
      replicate_above: Bytes up to which a parameter, or another array of the model's state, may be whole on every
        device of the axis that should shard it; a larger one is refused.

    One size may be -1: it becomes what the others leave over.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    context_by: str = "gather"
    ulysses: int = 1
    context_kernel: str = "auto"
    zero: int | None = None
    zero_over: str = "fsdp"
    sequence: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)
    how: Mapping[str, str] = field(default_factory=dict)
    exchange: Exchange = field(default_factory=AllReduce)
    axes: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, Axes] = field(default_factory=dict)
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replicate_above: int = 4 * 2**20

    def __post_init__(self):
        if self.exchange is None:
            object.__setattr__(self, "exchange", AllReduce())

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, as declared, outermost first."""
        own = {axis: getattr(self, axis) for axis in DECLARED} | dict(self.axes)
        return {axis: own.pop(axis) for axis in AXES if axis in own} | own

    def sized(self, sizes: Mapping[str, int]) -> "Parallel":
        """Returns the declaration with these sizes."""
        own = {axis: size for axis, size in sizes.items() if axis in DECLARED}
        return replace(self, **own, axes={axis: size for axis, size in sizes.items() if axis not in DECLARED})

    @property
    def ways(self) -> dict[str, str]:
        """Axis to the way in which its technique runs, of those that were chosen."""
        return ({"context": self.context_by} if self.context_by != "gather" else {}) | dict(self.how)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes whose devices each see other examples; `data` is none where all its replicas see the same."""
        axes = batch_axes(self.sizes)
        return tuple(axis for axis in axes if axis != "data") if self.exchange.same_examples else axes

    @property
    def stage(self) -> int:
        """The ZeRO stage: what `zero_over` shards; 0 where that is one device."""
        if all(self.sizes[axis] == 1 for axis in self.zero_axes):
            return 0
        return 3 if self.zero is None else self.zero

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes whose devices share the training state as `zero` says."""
        return ("fsdp", "context") if self.zero_over == "fsdp x context" else ("fsdp",)

    def problems(self) -> list[Problem]:
        """Returns what is wrong with sizes, rules and paths on their own; each technique knows of its own settings."""
        found = [
            Problem(
                f"axes={{{name!r}: {size!r}}}",
                f"axes has whole numbers for {', '.join(axis for axis in AXES if axis not in DECLARED)}",
                f"{name}={size!r}" if name in DECLARED else nearest(str(name), AXES),
            )
            for name, size in self.axes.items()
            if name not in AXES or name in DECLARED or type(size) is not int
        ]
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
