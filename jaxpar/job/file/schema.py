"""The schema of a job: each table of its file is a dataclass of the room it belongs to.

A table within another is a dataclass among that one's fields; what the keys mean is read off the
docstring, so it is written once.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxpar.checkpoint import Checkpoints
from jaxpar.data.spec import Data
from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.population.sweep import Sweep
from jaxpar.mesh.preset import Preset
from jaxpar.mesh.target import parse_target
from jaxpar.models.settings.adapters import Adapters
from jaxpar.models.settings.computing import Precision
from jaxpar.optim.growth import Growth, check_phases
from jaxpar.optim.optimizer import Optimizer
from jaxpar.parallel.declare import Parallel
from jaxpar.train.faults import Faults
from jaxpar.train.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """The run folder, and how processes wait for each other.

    Attributes:
      dir: The run folder; "" means runs/ and the name of the job file.
      resume: auto goes on from the latest checkpoint if there is one; never starts anew and
        refuses a folder that has checkpoints; must refuses a folder that has none.
      changed: Keys such as "optimizer.learning_rate" that may have another value than the run was trained
        with: what changes the next loss, or which examples are held out, is refused without this word.
      timeout: Seconds without a sign of life from another process, or in which it keeps the others
        waiting, after which the run ends and says so. Compiling, evaluating, saving and the start may take ten
        times as long; and whatever took a process long before may take twice that on top of it.
    """

    dir: str = ""
    resume: Literal["auto", "never", "must"] = "auto"
    changed: tuple[str, ...] = ()
    timeout: float = 30.0

    def __post_init__(self):
        check_ranges(self, "run", {"timeout": (1.0, 86400.0)})


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """The devices that a job uses.

    Attributes:
      simulate: So many simulated devices on the processor; 0 means the real ones.
      devices: So many real devices, the first ones; 0 means all. `jaxpar check` believes it
        on a machine that has fewer.
      target: The GPUs the job is meant for, CHIP:NODESxGPUS such as h100:16x8; `jaxpar inspect`
        compiles for them, there or not.
    """

    simulate: int = 0
    devices: int = 0
    target: str = ""

    @property
    def declared(self) -> bool:
        """Whether the job names its devices, so that they need not be present to be counted."""
        return any((self.simulate, self.devices, self.target))

    def __post_init__(self):
        if self.target and (meant := parse_target(self.target).devices) != (self.devices or meant):
            raise refuse(
                f"mesh.target = {self.target!r} and mesh.devices = {self.devices}",
                rule="the GPUs of the target are the devices of the job",
                fix=f"mesh.devices = {meant}, or leave it out",
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
    """Steps, batch size and precision.

    Attributes:
      steps: Updates of the whole run.
      global_batch: Examples per step, over all devices and microbatches.
      grow: [[step, factor], ...]: after so many steps a batch is so many times the one before, of more microbatches,
        where otherwise the rate would be divided. The rate is that of the first phase, which is what plan and inspect
        look at.
      accumulate: Microbatches per step.
      seed: Of the parameters, of dropout, of a loss's random keys and of the order of examples.
      loss: next_token, classify, or "package.module:function" of (model, batch), or of (model, batch, key): a random
        key, another one in every step, and the same in all evaluations.
      freeze: Patterns of paths, such as "embed" or "blocks/0*": parameters that are not trained. They keep their bits,
        and have no gradients and no optimizer state.
      adapters: Low-rank adapters beside matrices; all else is frozen.
      precision: The dtype of matmuls; precision = "bf16" for short.
      remat: How much the backward pass recomputes: none (keeps all), dots, all_dots, full (keeps the input of each
        layer) or offload (as full, with these inputs in host memory; for layers in a scan, without a pipeline).
      offload: Keep the optimizer state in host memory between steps.
      collectives: overlapped tells XLA of several GPUs to combine collectives less than it would, so that less of them
        is waited for; plain tells it nothing.
      eval_every: Steps between evaluations on the held-out examples; 0 evaluates at the end only.
      eval_batches: Most batches per evaluation; 0 takes all that are held out.
      patience: Evaluations in a row that are no better, by checkpoint.best, than the best before them, after which the
        run ends; 0 trains to the last step.
    """

    steps: int = 100
    global_batch: int = 32
    grow: tuple[tuple[int, int], ...] = ()
    accumulate: int = 1
    seed: int = 0
    loss: str = "next_token"
    freeze: tuple[str, ...] = ()
    adapters: Adapters = field(default_factory=Adapters)
    precision: Precision = field(default_factory=Precision)
    remat: Literal["none", "dots", "all_dots", "full", "offload"] = "none"
    offload: bool = False
    collectives: Preset = "overlapped"
    eval_every: int = 0
    eval_batches: int = 0
    patience: int = 0

    def __post_init__(self):
        most = 2**31 - 1  # the step is an int32; a seed has 32 bits
        lows = {"steps": 1, "global_batch": 1, "accumulate": 1, "seed": 0, "eval_every": 0, "eval_batches": 0}
        lows["patience"] = 0
        check_ranges(self, "train", {key: (low, most) for key, low in lows.items()})
        check_phases(self.grow, "train.grow", self.steps)
        if self.patience and not self.eval_every:
            raise refuse(
                f"train.patience = {self.patience} with train.eval_every = 0",
                rule="a run that waits for a better evaluation evaluates every so many steps",
                fix=f"eval_every = {max(1, self.steps // 20)}",
            )
        if self.freeze and self.adapters.rank:
            raise refuse(
                f"train.freeze = {list(self.freeze)} with train.adapters",
                rule="beside adapters, all is frozen but what adapters.also names",
                fix="freeze = []",
            )
        if (largest := self.global_batch * self.growth.factors[-1]) > most:
            raise refuse(
                f"train.grow to {largest} examples per step", rule=f"a batch has at most {most}", fix="smaller factors"
            )

    @property
    def frozen(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Patterns of what is frozen, and of what is trained nevertheless."""
        return (("*",), self.adapters.trained) if self.adapters.rank else (self.freeze, ())

    @property
    def growth(self) -> Growth:
        """The phases of the batch."""
        return Growth(self.grow)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, as its file declares it.

    Attributes:
      run: Where it lives.
      mesh: Which devices.
      parallel: How they are used.
      model: `name` (decoder, vit, resnet, mlp, "package.module:Object", or a Llama or GPT-2 folder of Hugging Face's,
        which a run then begins with) and its settings; a config object is a table
        of its own, [model.config], or "package.module:object".
      data: The training data.
      optimizer: How gradients become updates.
      sweep: In which settings of the optimizer the members of a population differ.
      train: How long, on how much at once.
      checkpoint: When the state is saved.
      faults: How to go on after NaN, infinite numbers or spikes.
      metrics: Which metrics are written, and how often.
      allow_import: Whether the Python objects it names may come from anywhere, and not only from the working
        directory's own modules; no key of a file, but said by who loads it.
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
    def declared(self) -> Parallel:
        """How devices are used: the members of a sweep are the replicas over `data`.

        Raises:
          JaxparError: If a sweep is wrong, or has replicas that agree in another way.
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
    """Returns the default value of a dataclass's field."""
    made = next(f for f in dataclasses.fields(cls) if f.name == key)
    return made.default if made.default is not dataclasses.MISSING else made.default_factory()  # pyright: ignore


def inner_tables(cls: type) -> dict[str, type]:
    """Returns the fields of a dataclass that are tables themselves, as what they are by default."""
    usual = {f.name: default(cls, f.name) for f in dataclasses.fields(cls)}
    return {name: type(value) for name, value in usual.items() if dataclasses.is_dataclass(value)}


def walk(cls: type, section: str) -> Iterator[tuple[str, type]]:
    yield section, cls
    for key, inner in inner_tables(cls).items():
        yield from walk(inner, f"{section}.{key}")


SECTIONS = tuple(f.name for f in dataclasses.fields(Job) if f.name != "allow_import")
TABLES: dict[str, type] = {
    name: table for section, cls in inner_tables(Job).items() for name, table in walk(cls, section)
}


def meanings(cls: type) -> dict[str, str]:
    """Returns the meaning of each field of a dataclass, from the Attributes of its docstring."""
    text = (cls.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    indent, key = None, None
    for line in text.splitlines():
        if not line.strip():
            break
        indent = indent if indent is not None else len(line) - len(line.lstrip())
        if len(line) - len(line.lstrip()) == indent:
            key, _, meaning = line.strip().partition(": ")
            found[key] = meaning
        elif key:
            found[key] += " " + line.strip()
    return found
