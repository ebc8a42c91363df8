"""The schema of a job: each table of the file is a dataclass of the package that reads it.

An inner table is a dataclass field. The docstring's Attributes give the meaning of each key, so it is written once.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jaxpar.checkpoint import Checkpoints
from jaxpar.data.spec import Data
from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import AllReduce
from jaxpar.exchange.population.sweep import Sweep
from jaxpar.files import expand_home
from jaxpar.mesh.target import parse_target
from jaxpar.mesh.xla import Preset
from jaxpar.models.settings.computing import Precision
from jaxpar.models.settings.fine_tuning import DPO, Adapters
from jaxpar.optim.optimizer import Growth, Optimizer, check_phases
from jaxpar.parallel.declaration import Parallel
from jaxpar.train.faults import Faults
from jaxpar.train.metrics import Metrics
from jaxpar.train.step_trace import check_steps


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """The run folder, resuming, and the timeout between processes.

    Attributes:
      dir: The run folder; "" means runs/ and the name of the job file.
      resume: auto continues from the latest checkpoint if there is one; never starts a new run and
        refuses a folder that has checkpoints; must refuses a folder that has none.
      changed: Keys such as "optimizer.learning_rate" that may differ from the run's earlier job: a change of the
        next loss or of the held-out examples is refused unless its key is named here.
      timeout: Seconds without a sign of life from another process, or of making the others wait, after which the run
        ends with a message. Compiling, evaluating, saving and the start may take ten times as long; and an act that
        once took long may take twice that time on top.
    """

    dir: str = ""
    resume: Literal["auto", "never", "must"] = "auto"
    changed: tuple[str, ...] = ()
    timeout: float = 30.0

    def __post_init__(self):
        check_ranges(self, "run", {"timeout": (1.0, 86400.0)})
        if str(Path(self.dir)).startswith("~"):  # also "./~x", a folder of that name
            object.__setattr__(self, "dir", str(expand_home(self.dir, "run.dir")))


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """The devices that a job uses.

    Attributes:
      simulate: Number of simulated devices on the CPU; 0 means real devices.
      devices: Number of real devices, counted from the first; 0 means all. `jaxpar check` accepts it on a machine
        that has fewer.
      target: The GPUs the job is meant for, CHIP:NODESxGPUS such as h100:16x8; `jaxpar inspect` compiles for them,
        present or not.
    """

    simulate: int = 0
    devices: int = 0
    target: str = ""

    @property
    def names_devices(self) -> bool:
        """Whether the job names its devices, so that they need not be present to be counted."""
        return any((self.simulate, self.devices, self.target))

    def __post_init__(self):
        if self.target and (target_devices := parse_target(self.target).devices) != (self.devices or target_devices):
            raise refuse(
                f"mesh.target = {self.target!r} and mesh.devices = {self.devices}",
                rule="the GPUs of the target are the devices of the job",
                fix=f"mesh.devices = {target_devices}, or leave it out",
            )
        check_ranges(self, "mesh", {"simulate": (0, 2**16), "devices": (0, 2**31 - 1)})
        if self.simulate and self.devices:
            raise refuse(
                f"mesh.simulate = {self.simulate} and mesh.devices = {self.devices}",
                rule="devices are simulated or real",
                fix="leave one out",
            )


@dataclass(frozen=True, kw_only=True)
class TrainTable:
    """Steps, batch size, loss, precision and memory savings.

    Attributes:
      steps: Total updates of the run.
      global_batch: Examples per step, over all devices and microbatches.
      grow: [[step, factor], ...]: from that step on, batches are factor times larger, by more microbatches. This
        replaces a division of the learning rate, which stays that of the first phase; plan and inspect describe the
        first phase.
      accumulate: Microbatches per step.
      seed: Seed of parameters, dropout, a loss's random keys and the order of examples.
      loss: next_token, classify, dpo (of data.preferences, against a frozen reference: the model as it is at the
        start, or with adapters the model without them), or "package.module:function" of (model, batch) or (model,
        batch, key), where the random key differs in every step and is the same in all evaluations.
      dpo: Settings of the loss dpo.
      freeze: Path patterns, such as "embed" or "blocks/0*", of parameters that are not trained: they stay bitwise
        equal, without gradients and optimizer state.
      adapters: Low-rank adapters of matrices; all other parameters are frozen.
      precision: The dtype of matmuls; precision = "bf16" for short.
      remat: How much the backward pass recomputes: none (saves all activations), dots, all_dots, full (saves the input
        of each layer) or offload (like full, with these inputs in host memory; for scanned layers, without a pipeline).
      offload: Keep the optimizer state in host memory between steps.
      collectives: overlapped makes XLA on several GPUs combine fewer collectives, so that more of their time is
        hidden; plain keeps XLA's defaults.
      eval_every: Steps between evaluations on the held-out examples; 0 evaluates at the end only.
      eval_batches: Maximal batches per evaluation; 0 takes all held-out examples.
      profile: [first, last]: the profiler of JAX traces these steps, both of them and those between, to RUN/profile.
      patience: The run ends after this many evaluations in a row without a new best of checkpoint.best; 0 trains to
        the last step.
    """

    steps: int = 100
    global_batch: int = 32
    grow: tuple[tuple[int, int], ...] = ()
    accumulate: int = 1
    seed: int = 0
    loss: str = "next_token"
    dpo: DPO = field(default_factory=DPO)
    freeze: tuple[str, ...] = ()
    adapters: Adapters = field(default_factory=Adapters)
    precision: Precision = field(default_factory=Precision)
    remat: Literal["none", "dots", "all_dots", "full", "offload"] = "none"
    offload: bool = False
    collectives: Preset = "overlapped"
    eval_every: int = 0
    eval_batches: int = 0
    patience: int = 0
    profile: tuple[int, ...] = ()

    def __post_init__(self):
        limit = 2**31 - 1  # the step is an int32; a seed has 32 bits
        lows = {"steps": 1, "global_batch": 1, "accumulate": 1, "seed": 0, "eval_every": 0, "eval_batches": 0}
        lows["patience"] = 0
        check_ranges(self, "train", {key: (low, limit) for key, low in lows.items()})
        check_phases(self.grow, "train.grow", self.steps)
        check_steps(self.profile, self.steps, "train.profile")
        if self.patience and not self.eval_every:
            raise refuse(
                f"train.patience = {self.patience} with train.eval_every = 0",
                rule="early stopping needs regular evaluations",
                fix=f"eval_every = {max(1, self.steps // 20)}",
            )
        if self.freeze and self.adapters.rank:
            raise refuse(
                f"train.freeze = {list(self.freeze)} with train.adapters",
                rule="with adapters, all parameters are frozen except those that adapters.also names",
                fix="freeze = []",
            )
        if (largest := self.global_batch * self.growth.factors[-1]) > limit:
            raise refuse(
                f"train.grow to {largest} examples per step", rule=f"a batch has at most {limit}", fix="smaller factors"
            )

    @property
    def frozen(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Path patterns of frozen parameters, and of exceptions that are trained nevertheless."""
        if self.adapters.rank:
            return ("*",), self.adapters.trained_patterns
        return (*self.freeze, *["reference"] * (self.loss == "dpo")), ()

    @property
    def growth(self) -> Growth:
        """The phases of a growing batch."""
        return Growth(self.grow)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, as its file declares it.

    Attributes:
      run: Run folder and resuming.
      mesh: Devices.
      parallel: Sizes of the parallel axes and techniques.
      model: `name` (decoder, vit, resnet, unet, alexnet, vgg, googlenet, mlp, "package.module:Object", or a Hugging
        Face folder of a Llama or GPT-2, from whose weights the run then starts) and its settings; a config object is a
        table of its own, [model.config], or "package.module:object".
      data: Training data.
      optimizer: Optimizer and learning rate.
      sweep: Optimizer settings in which the members of a population differ.
      train: Steps, batch size, precision and memory savings.
      checkpoint: When the state is saved.
      faults: Reaction to NaN, infinite numbers or spikes.
      metrics: Written metrics and their frequency.
      allow_import: Whether the job may import Python objects from any module, not only those in the working
        directory. Not a key of the file: the caller that loads the job sets it.
    """

    run: RunTable = field(default_factory=RunTable)
    mesh: MeshTable = field(default_factory=MeshTable)
    parallel: Parallel = field(default_factory=Parallel)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "decoder"})
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sweep: Sweep = field(default_factory=Sweep)
    train: TrainTable = field(default_factory=TrainTable)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    faults: Faults = field(default_factory=Faults)
    metrics: Metrics = field(default_factory=Metrics)
    allow_import: bool = False

    @property
    def effective_parallel(self) -> Parallel:
        """`parallel`; for a sweep, with its population as the exchange: members are the replicas over `data`.

        Raises:
          JaxparError: If the sweep is invalid, or combined with another exchange than all_reduce.
        """
        if not self.sweep.over:
            return self.parallel
        self.sweep.check(self.optimizer)
        if self.parallel.exchange != AllReduce():
            raise refuse(
                f"exchange {self.parallel.exchange} with [sweep]",
                rule="members of a sweep are the replicas over `data`, and agree in nothing",
                fix='leave one of the two out: parallel.exchange.name = "all_reduce", or no [sweep]',
            )
        return replace(self.parallel, exchange=self.sweep.population())


def default(cls: type, key: str) -> Any:
    """Returns the default value of a dataclass field."""
    item = next(f for f in dataclasses.fields(cls) if f.name == key)
    return item.default if item.default is not dataclasses.MISSING else item.default_factory()  # pyright: ignore


def inner_tables(cls: type) -> dict[str, type]:
    """Maps each field of a dataclass that is itself a table to the class of its default."""
    defaults = {f.name: default(cls, f.name) for f in dataclasses.fields(cls)}
    return {name: type(value) for name, value in defaults.items() if dataclasses.is_dataclass(value)}


def iter_tables(cls: type, section: str) -> Iterator[tuple[str, type]]:
    yield section, cls
    for key, inner in inner_tables(cls).items():
        yield from iter_tables(inner, f"{section}.{key}")


SECTIONS = tuple(f.name for f in dataclasses.fields(Job) if f.name != "allow_import")
TABLES: dict[str, type] = {
    name: table for section, cls in inner_tables(Job).items() for name, table in iter_tables(cls, section)
}


def meanings(cls: type) -> dict[str, str]:
    """Parses the meaning of each field from the Attributes section of a dataclass's docstring."""
    text = (cls.__doc__ or "").partition("Attributes:\n")[2]
    result: dict[str, str] = {}
    indent, key = None, None
    for line in text.splitlines():
        if not line.strip():
            break
        indent = indent if indent is not None else len(line) - len(line.lstrip())
        if len(line) - len(line.lstrip()) == indent:
            key, _, meaning = line.strip().partition(": ")
            result[key] = meaning
        elif key:
            result[key] += " " + line.strip()
    return result
