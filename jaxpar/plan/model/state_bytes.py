"""Bytes of the training state on a device, by ZeRO stage, from bytes per parameter.

    stage   bytes of a device, P parameters over N devices     if parameters are sharded between steps (jaxpar)
    0       (p + g + o) P                                      (p + g + o) P
    1       (p + g) P + o P / N                                g P + (p + o) P / N
    2       p P + (g + o) P / N                                (p + g + o) P / N
    3       (p + g + o) P / N                                  (p + g + o) P / N

Published tools disagree because their p, g and o differ, so every number here comes with a `Recipe`. All are exact if
N divides every array; jaxpar replicates an array that N does not divide. Activations, gathered parameters and casts are
not included: in stages 1 and 2 jaxpar gathers a copy of all parameters for a step, 2 P bytes in bf16, in stage 3 of a
layer.

Source: Rajbhandari et al. (2020), arXiv:1910.02054, figure 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxpar.errors import check_ranges, refuse, suggest

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Bytes of training state per parameter.

    Attributes:
      name: Name of the training program.
      parameters: Bytes of the copy that ZeRO calls the parameters.
      gradients: Bytes of its gradient.
      optimizer: Bytes that only the update needs: moments, and a separate master copy.
      dtypes: Dtypes behind the bytes, as text.
      sharded_from: First ZeRO stage that shards the parameters between steps.
    """

    name: str
    parameters: float
    gradients: float
    optimizer: float
    dtypes: str
    sharded_from: int = 3

    def __post_init__(self):
        check_ranges(self, "recipe", {key: (0.0, 1024.0) for key in ("parameters", "gradients", "optimizer")})

    @property
    def total(self) -> float:
        """Bytes per parameter in all."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.total:g} bytes per parameter = parameters {self.parameters:g} + gradients "
            f"{self.gradients:g} + optimizer {self.optimizer:g} ({self.dtypes})"
        )


PAPER = Recipe(
    name="ZeRO's paper", parameters=2, gradients=2, optimizer=12,
    dtypes="16-bit parameters and gradients; float32 master copy, mean and variance of Adam; section 3.1",
)  # fmt: skip
MEGATRON = Recipe(
    name="Megatron-LM", parameters=2, gradients=4, optimizer=12,
    dtypes="bfloat16 parameters, float32 gradients; float32 master copy, mean and variance of Adam; its report of "
    "theoretical memory, 6 + 12/N with the distributed optimizer",
)  # fmt: skip
JAXPAR = Recipe(
    name="jaxpar, adamw", parameters=4, gradients=4, optimizer=8, sharded_from=1,
    dtypes="float32 parameters, cast where bf16 uses them, and gradients; float32 mean and variance",
)  # fmt: skip
RECIPES: Mapping[str, Recipe] = {"paper": PAPER, "megatron": MEGATRON, "jaxpar": JAXPAR}
# bytes per parameter of optimizers whose state does not depend on shapes
MOMENTS: Mapping[str, int] = {"adamw": 8, "adam": 8, "lamb": 8, "sgd": 4, "lion": 4, "lars": 4}


def recipe(optimizer: str, *, momentum: bool = True) -> Recipe:
    """Returns jaxpar's bytes per parameter with one of its optimizers.

    Args:
      optimizer: The `name` of `optim.optimizer.Optimizer`.
      momentum: Whether sgd's `beta1` is above 0.

    Raises:
      JaxparError: If there is no such optimizer, or its state depends on the shapes of the parameters.
    """
    if optimizer not in MOMENTS:
        by_shapes = optimizer in ("adafactor", "muon")
        raise refuse(
            f"bytes per parameter of {optimizer!r}",
            rule="the state of adafactor and muon depends on the shapes of the parameters"
            if by_shapes
            else f"known are {', '.join(MOMENTS)}",
            fix="the abstract state of a step counts it: step.abstract()" if by_shapes else suggest(optimizer, MOMENTS),
        )
    size = 0 if optimizer == "sgd" and not momentum else MOMENTS[optimizer]
    moments = {0: "no state", 4: "float32 momentum", 8: "float32 mean and variance"}[size]
    return replace(
        JAXPAR,
        name=f"jaxpar, {optimizer}",
        optimizer=size,
        dtypes=f"float32 parameters, cast where bf16 uses them, and gradients; {moments}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of training state on one device, and the recipe behind them.

    Attributes:
      recipe: The bytes per parameter.
      stage: ZeRO stage.
      shards: Devices that share the sharded state.
      parameters: Bytes of the parameters.
      gradients: Bytes of the gradients during a step. In stage 1 jaxpar reduce-scatters the gradients of a
        single microbatch at once.
      optimizer: Bytes of the optimizer state.
    """

    recipe: Recipe
    stage: int
    shards: int
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def between_steps(self) -> float:
        """Bytes between steps, without gradients."""
        return self.parameters + self.optimizer

    @property
    def formula(self) -> str:
        """The bytes per parameter as arithmetic: `2 + (2 + 12) / 64`."""
        recipe = self.recipe
        parts = ((recipe.parameters, recipe.sharded_from), (recipe.gradients, 2), (recipe.optimizer, 1))
        replicated = [part for part, since in parts if self.stage < since]
        sharded = [part for part, since in parts if self.stage >= since]
        text = " + ".join(f"{part:g}" for part in sharded)
        divided = [f"({text}) / {self.shards}" if len(sharded) > 1 else f"{text} / {self.shards}"] if sharded else []
        return " + ".join([*(f"{part:g}" for part in replicated), *divided])

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.total / 1e9:.4g} GB = {self.formula} bytes per parameter, {self.recipe.name}"


def state(parameters: float, *, stage: int, shards: int, recipe: Recipe = JAXPAR) -> StateBytes:
    """Returns the bytes of a device's share of the training state.

    Args:
      parameters: Parameters of the model; those on one device if tensor or pipeline parallelism splits them.
      stage: ZeRO stage: shards have 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
      shards: Devices of the axis `fsdp`.
      recipe: Bytes per parameter.

    Raises:
      JaxparError: If the stage is not 0 to 3, or a number of parameters or devices is out of range.

    >>> print(state(7.5e9, stage=2, shards=64, recipe=PAPER))
    stage 2: 16.64 GB = 2 + (2 + 12) / 64 bytes per parameter, ZeRO's paper
    """
    if isinstance(stage, bool) or stage not in STAGES:
        raise refuse(f"ZeRO stage {stage!r}", rule="stages are 0, 1, 2 and 3", fix="stage=3")
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise refuse(f"{shards!r} shards", rule="a whole number of devices, at least 1", fix="shards=64")
    if not 0 <= parameters <= 1e18:
        raise refuse(f"{parameters!r} parameters", rule="a number of parameters, up to 1e18", fix="parameters=7.5e9")

    def share(size: float, since: int) -> float:
        return size * parameters / (shards if stage >= since else 1)

    return StateBytes(
        recipe=recipe,
        stage=stage,
        shards=shards,
        parameters=share(recipe.parameters, recipe.sharded_from),
        gradients=share(recipe.gradients, 2),
        optimizer=share(recipe.optimizer, 1),
    )


def table(parameters: float, *, shards: int, recipe: Recipe = JAXPAR) -> tuple[StateBytes, ...]:
    """Returns the state of a device in each of the four ZeRO stages."""
    return tuple(state(parameters, stage=stage, shards=shards, recipe=recipe) for stage in STAGES)
