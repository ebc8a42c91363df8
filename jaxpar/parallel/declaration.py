"""The declaration of a user: sizes of the mesh axes, and the options of their techniques.

A pipeline's axis `pipe` puts consecutive layers on different devices. Between steps a stage stores a contiguous range
of layers, so that a checkpoint depends neither on the schedule nor on the depth of the pipeline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import Keywords, Problem, suggest
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.mesh.axes import AXES, batch_axes

if TYPE_CHECKING:
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
Axes = str | tuple[str, ...] | None
DECLARED = ("pipe", "data", "fsdp", "context", "tensor")  # axes of every mesh, each with a field
IMAGE = ("height", "width")
OPTIONAL = ("expert", *IMAGE)  # axes with a field, which a mesh has only if their size is not 1

ZERO_OVER = ("fsdp", "fsdp x context")

ZERO_SHARDS = (
    "nothing",
    "optimizer state, and parameters between steps",
    "optimizer state, gradients, and parameters between steps",
    "optimizer state, gradients and parameters",
)


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


def size_setting(axis: str, size: int) -> str:
    """Returns the text that sets the size of an axis in `Parallel`: `tensor=2`; without a field, `axes={'lane': 2}`."""
    return f"{axis}={size}" if axis in (*DECLARED, *OPTIONAL) else f"axes={{{axis!r}: {size}}}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Parallel(Keywords):
    """The parallelism of a training job. Sizes multiply to the number of devices.

    Attributes:
      pipe: Number of stages of a pipeline; each stage has consecutive layers of the model's stack.
      data: Number of replicas of the training state, which train on different examples (DDP; with `fsdp`, HSDP).
      fsdp: Number of devices that shard one training state, and train on different examples.
      context: Number of devices that split every sequence (context parallelism).
      context_by: Implementation of attention between sequence shards. gather: every device gathers
        all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2): one collective, but in 16 bits the scores [seq /
        context, seq] are saved; for short sequences. ring: keys and values rotate (arXiv:2310.01889), no scores are
        saved. ulysses: devices exchange heads for tokens (arXiv:2309.14509). auto: the fastest by a plan's formulas of
        those whose scores of one layer fit the chip, chosen and noted as a step is traced.
      ulysses: Number of neighbouring devices that exchange heads, in groups that rotate keys (arXiv:2405.07719).
      context_kernel: Implementation of a device's part of attention with ring or ulysses. auto: cuDNN's fused kernel on
        GPUs in 16 bits where it supports the heads and masks, else blocks of plain JAX; `step.compiler.implementations`
        and reports say which, and why. cudnn: the kernel, or an error; context_by="auto" then chooses a form that has
        it. plain: blocks of plain JAX.
      tensor: Number of devices that split every large matrix (Megatron tensor parallelism).
      expert: Number of devices that hold different experts of a mixture, and train on different examples (expert
        parallelism; GShard, arXiv:2006.16668). They shard all other parameters together with `fsdp`, as `zero` says.
      height: Devices that share every image, each with a piece of its rows (spatial parallelism; Dryden et al. 2019,
        arXiv:1903.06681). Convolutions exchange the rows at the borders of the pieces with the neighbours. Of a volume
        this is the first dim after the batch.
      width: As `height`, for columns: the second dim after the batch.
      zero: What `fsdp` and `expert` shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters (ZeRO,
        Rajbhandari et al. 2020, arXiv:1910.02054). None means 3 where fsdp or expert is not 1. With 1 and 2 parameters
        are also sharded between steps, and gathered once a step, in the compute dtype. In a pipeline 1 and 3 add up the
        gradients of a step whole and scatter the sum once (but see `Pipeline.gather`). 2 scatters in every tick that
        makes gradients (M + P - 1 ticks, or all ticks of a table that mixes kinds of ops) and adds up shards: less
        memory, more traffic.
      zero_over: Devices that share the training state as `zero` says: "fsdp", or "fsdp x context". The devices of
        `context` see shards of the same sequences and have the same parameters, so with too few sequences for `fsdp`
        they can shard the state as well, as FSDP does over context parallelism in torchtitan.
      sequence: Whether the activations between the matrices are split along `seq` over `tensor` (Korthikanti et al.
        2022, arXiv:2205.05198).
      pipeline: The schedule and options of the pipeline.
      how: Axis to the implementation of its technique, if there are several: {"context": "gather"}.
      exchange: Method that synchronizes the replicas over `data`; None all-reduces gradients in every step.
      axes: Sizes of further axes, for techniques that a user adds: {"toy": 2}.
      rules: Name of a dim, of parameters or activations, to mesh axis (or axes, or None), before jaxpar's own names. A
        name that the model does not use is refused once its step is traced.
      paths: End of a parameter's path (regular expression) to the names of its trailing dims.
      activations: Line of the model's source, with the sizes of an array's last dims, to the names of its dims:
        {"model.py:31 [..., 4096]": ("batch", None, "mlp")}, as if the line called `jp.constrain`; "model.py:31:17" for
        the expression at that column. `specs="found"` and `jaxpar specs` write such names.
      specs: "found" lets an integer program choose the dims that `tensor` and `context` split, of parameters and of
        activations, in place of rules for matrices: `jp.find_specs`. "" leaves them to names, annotations and use.
      replicate_above: Bytes up to which an array of the training state (of the model, of the optimizer, of an exchange)
        may stay whole on every device of the axis that should shard it; a larger one is refused.

    One size may be -1: it becomes the number of devices divided by the other sizes.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    height: int = 1
    width: int = 1
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
    activations: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    specs: str = ""
    replicate_above: int = 4 * 2**20

    def __post_init__(self):
        if self.exchange is None:
            object.__setattr__(self, "exchange", AllReduce())
        for key in ("paths", "activations"):  # TOML has no null: "" is a dim without a name there
            if isinstance(names := getattr(self, key), Mapping):
                object.__setattr__(self, key, {each: _blank_to_none(dims) for each, dims in names.items()})

    @classmethod
    def keyword_fix(cls, key: str, value: Any, names: Sequence[str]) -> str:
        """Returns the fix for a keyword without a field; an axis of the mesh may be one."""
        from jaxpar.other_names import OTHER_NAMES  # not loaded where nothing is wrong

        axis = OTHER_NAMES.get(key, key)
        return size_setting(axis, value) if axis in AXES else super().keyword_fix(key, value, names)

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size, as declared, outermost first."""
        declared = {axis: getattr(self, axis) for axis in DECLARED} | dict(self.axes)
        declared |= {axis: size for axis in OPTIONAL if (size := getattr(self, axis)) != 1}
        return {axis: declared.pop(axis) for axis in AXES if axis in declared} | declared

    def with_sizes(self, sizes: Mapping[str, int]) -> "Parallel":
        """Returns the declaration with these sizes."""
        fields = {axis: size for axis, size in sizes.items() if axis in (*DECLARED, *OPTIONAL)}
        return replace(self, **fields, axes={axis: size for axis, size in sizes.items() if axis not in fields})

    @property
    def implementations(self) -> dict[str, str]:
        """Axis to the implementation of its technique, for axes whose implementation the user chose."""
        return ({"context": self.context_by} if self.context_by != "gather" else {}) | dict(self.how)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes that split examples; without `data` if all its replicas train on the same examples."""
        axes = batch_axes(self.sizes)
        return tuple(axis for axis in axes if axis != "data") if self.exchange.same_examples else axes

    @property
    def stage(self) -> int:
        """The ZeRO stage over the axes in `zero_over`; 0 if their size is 1."""
        if all(self.sizes[axis] == 1 for axis in self.zero_axes):
            return 0
        return 3 if self.zero is None else self.zero

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes that shard the training state by the stage `zero`."""
        axes = ("fsdp", "expert") if self.expert != 1 else ("fsdp",)
        return (*axes, "context") if self.zero_over == "fsdp x context" else axes

    def problems(self) -> list[Problem]:
        """Returns the problems of sizes, rules and paths; each technique checks its own settings."""
        with_field = (*DECLARED, *OPTIONAL)
        problems = [
            Problem(
                f"axes={{{name!r}: {size!r}}}",
                f"axes has whole numbers for {', '.join(axis for axis in AXES if axis not in with_field)}",
                f"{name}={size!r}" if name in with_field else suggest(str(name), AXES),
            )
            for name, size in self.axes.items()
            if name not in AXES or name in with_field or type(size) is not int
        ]
        if self.specs not in ("", "found"):
            rule = 'specs="found" finds the dims that `tensor` and `context` split; "" takes them from names or use'
            problems.append(Problem(f"specs={self.specs!r:.60}", rule, suggest(str(self.specs), ["found"])))
        if self.activations:
            from jaxpar.sharding.source_lines import line_problems  # other declarations do not load it

            problems += line_problems(self.activations)
        for key, example in (("rules", '{"mlp": "tensor"}'), ("paths", '{"up/kernel": ("embed", "mlp")}')):
            problems += _shape_problems(key, getattr(self, key), example)
        return problems


def _blank_to_none(dims: object) -> object:
    return type(dims)(None if dim == "" else dim for dim in dims) if type(dims) in (list, tuple) else dims  # type: ignore[call-arg, attr-defined]


def _shape_problems(key: str, given: object, example: str) -> list[Problem]:
    rule = (
        "rules map the name of a dim to a mesh axis, a tuple of them, or None"
        if key == "rules"
        else "paths map the end of a path to a tuple of names of dims"
    )
    if not isinstance(given, Mapping):
        return [Problem(f"{key}={given!r}", rule, f"{key}={example}")]

    def good(value: object) -> bool:
        single = value is None or isinstance(value, str)
        names = isinstance(value, (tuple, list)) and all(
            isinstance(entry, str) or (entry is None and key == "paths") for entry in value
        )
        return names or (single and key == "rules")

    return [
        Problem(f"{key}={{{name!r}: {value!r}}}", rule, f"{key}={example}")
        for name, value in given.items()
        if not isinstance(name, str) or not good(value)
    ]
