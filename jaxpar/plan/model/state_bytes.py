"""Bytes of the training state on a device, by ZeRO stage, and the bytes per parameter that this assumes.

    stage   bytes of a device, P parameters over N devices     where parameters are shards between steps (jaxpar)
    0       (p + g + o) P                                      (p + g + o) P
    1       (p + g) P + o P / N                                g P + (p + o) P / N
    2       p P + (g + o) P / N                                (p + g + o) P / N
    3       (p + g + o) P / N                                  (p + g + o) P / N

Published tools disagree because their p, g and o differ, so every number here comes with a
`Recipe`. All are exact where N divides every array; jaxpar keeps an array that it does not divide
whole. Activations, what is gathered for use and the casts of a step are no part of it: in stages 1 and 2 jaxpar
gathers a copy of all parameters for the time of a step, 2 P bytes in bf16, in stage 3 a layer's.

Source: Rajbhandari et al. (2020), arXiv:1910.02054, figure 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxpar.errors import check_ranges, nearest, refuse

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The bytes that a way of training keeps for each parameter.

    Attributes:
      name: What it is called.
      parameters: Bytes of the copy that ZeRO calls the parameters.
      gradients: Bytes of its gradient.
      optimizer: Bytes of all that only the update needs: moments, and a master copy if it is apart.
      why: What the bytes are.
      since: ZeRO's stage from which the parameters are sharded between steps.
    """

    name: str
    parameters: float
    gradients: float
    optimizer: float
    why: str
    since: int = 3

    def __post_init__(self):
        check_ranges(self, "recipe", {key: (0.0, 1024.0) for key in ("parameters", "gradients", "optimizer")})

    @property
    def total(self) -> float:
        """Bytes per parameter in all."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.total:g} bytes per parameter = parameters {self.parameters:g} + gradients "
            f"{self.gradients:g} + optimizer {self.optimizer:g} ({self.why})"
        )


PAPER = Recipe(
    name="ZeRO's paper", parameters=2, gradients=2, optimizer=12,
    why="16-bit parameters and gradients; float32 master copy, mean and variance of Adam; section 3.1",
)  # fmt: skip
MEGATRON = Recipe(
    name="Megatron-LM", parameters=2, gradients=4, optimizer=12,
    why="bfloat16 parameters, float32 gradients; float32 master copy, mean and variance of Adam; its report of "
    "theoretical memory, 6 + 12/N with the distributed optimizer",
)  # fmt: skip
JAXPAR = Recipe(
    name="jaxpar, adamw", parameters=4, gradients=4, optimizer=8, since=1,
    why="float32 parameters, cast where bf16 uses them, and gradients; float32 mean and variance",
)  # fmt: skip
RECIPES: Mapping[str, Recipe] = {"paper": PAPER, "megatron": MEGATRON, "jaxpar": JAXPAR}
# bytes per parameter of optimizers for which shapes do not matter
MOMENTS: Mapping[str, int] = {"adamw": 8, "adam": 8, "lamb": 8, "sgd": 4, "lion": 4, "lars": 4}


def recipe(optimizer: str, *, momentum: bool = True) -> Recipe:
    """Returns what jaxpar keeps with one of its optimizers.

    Args:
      optimizer: The `name` of `optim.optimizer.Optimizer`.
      momentum: Whether sgd's `beta1` is above 0.

    Raises:
      JaxparError: If there is no such optimizer, or its state depends on the shapes of the parameters.
    """
    if optimizer not in MOMENTS:
        shaped = optimizer in ("adafactor", "muon")
        raise refuse(
            f"bytes per parameter of {optimizer!r}",
            rule="the state of adafactor and muon depends on the shapes of the parameters"
            if shaped
            else f"known are {', '.join(MOMENTS)}",
            fix="the abstract state of a step counts it: step.abstract()" if shaped else nearest(optimizer, MOMENTS),
        )
    size = 0 if optimizer == "sgd" and not momentum else MOMENTS[optimizer]
    what = {0: "no state", 4: "float32 momentum", 8: "float32 mean and variance"}[size]
    return replace(
        JAXPAR,
        name=f"jaxpar, {optimizer}",
        optimizer=size,
        why=f"float32 parameters, cast where bf16 uses them, and gradients; {what}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Bytes of one device, and what they assume.

    Attributes:
      recipe: The bytes per parameter.
      stage: Of ZeRO.
      shards: Devices that share what is sharded.
      parameters: Bytes of the parameters.
      gradients: Bytes of the gradients, while there are any. In stage 1 jaxpar scatters a lone microbatch's at once.
      optimizer: Bytes of the optimizer's state.
    """

    recipe: Recipe
    stage: int
    shards: int
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def kept(self) -> float:
        """Bytes between steps, when there are no gradients."""
        return self.parameters + self.optimizer

    @property
    def assumes(self) -> str:
        """The bytes per parameter as arithmetic: `2 + (2 + 12) / 64`."""
        recipe = self.recipe
        parts = ((recipe.parameters, recipe.since), (recipe.gradients, 2), (recipe.optimizer, 1))
        whole = [part for part, since in parts if self.stage < since]
        shared = [part for part, since in parts if self.stage >= since]
        text = " + ".join(f"{part:g}" for part in shared)
        spread = [f"({text}) / {self.shards}" if len(shared) > 1 else f"{text} / {self.shards}"] if shared else []
        return " + ".join([*(f"{part:g}" for part in whole), *spread])

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.total / 1e9:.4g} GB = {self.assumes} bytes per parameter, {self.recipe.name}"


def state(parameters: float, *, stage: int, shards: int, recipe: Recipe = JAXPAR) -> State:
    """Returns the bytes of a device's share of the training state.

    Args:
      parameters: How many the model has; those of one device, where tensor or pipeline parallelism splits them.
      stage: What the shards share: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
      shards: Devices of the axis `fsdp`.
      recipe: Bytes per parameter.

    Raises:
      JaxparError: If there is no such stage, or no such number of parameters or devices.

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

    return State(
        recipe=recipe,
        stage=stage,
        shards=shards,
        parameters=share(recipe.parameters, recipe.since),
        gradients=share(recipe.gradients, 2),
        optimizer=share(recipe.optimizer, 1),
    )


def table(parameters: float, *, shards: int, recipe: Recipe = JAXPAR) -> tuple[State, ...]:
    """Returns the bytes of a device in each of the four stages."""
    return tuple(state(parameters, stage=stage, shards=shards, recipe=recipe) for stage in STAGES)
