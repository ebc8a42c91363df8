"""ZeRO and FSDP: `fsdp` shards the training state and splits examples; `context` may also shard the state."""

from jaxpar.errors import Problem, suggest
from jaxpar.parallel.declaration import ZERO_OVER, ZERO_SHARDS, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique, unsplit_axis_problems
from jaxpar.parallel.unsharded_arrays import model_problems


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `zero`, `zero_over` and `replicate_above`."""
    errors = []
    if parallel.zero is not None and (type(parallel.zero) is not int or not 0 <= parallel.zero <= 3):
        errors.append(
            Problem(
                f"zero={parallel.zero!r}",
                "zero is 0 (nothing), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)",
                "zero=3",
            )
        )
    elif parallel.zero and not parallel.stage:
        errors.append(
            Problem(
                f"zero={parallel.zero} with {' x '.join(f'{axis}=1' for axis in parallel.zero_axes)} shards nothing",
                f"zero={parallel.zero} shards {ZERO_SHARDS[parallel.zero]} over {_axes(parallel)}",
                f"fsdp=2 or more (fsdp=-1 takes what is left), {_zero_over_fix(parallel)}or leave zero out",
            )
        )
    errors += _zero_over_problems(parallel)
    if type(parallel.replicate_above) is not int or parallel.replicate_above < 0:
        errors.append(
            Problem(
                f"replicate_above={parallel.replicate_above!r}",
                "replicate_above is a number of bytes",
                "replicate_above=4 * 2**20",
            )
        )
    return errors


def _axes(parallel: Parallel) -> str:
    return " and ".join(f"the axis `{axis}`" for axis in parallel.zero_axes)


def _zero_over_fix(parallel: Parallel) -> str:
    shareable = type(parallel.context) is int and parallel.context > 1 and parallel.zero_over == "fsdp"
    return "zero_over='fsdp x context', " * shareable


def _zero_over_problems(parallel: Parallel) -> list[Problem]:
    over = parallel.zero_over
    if over not in ZERO_OVER:
        return [
            Problem(f"zero_over={over!r}", f"zero_over is one of {', '.join(ZERO_OVER)}", suggest(str(over), ZERO_OVER))
        ]
    if over == "fsdp":
        return []
    got, rule = f"zero_over={over!r}", "devices of `context` share the training state"
    if parallel.context == 1:
        return [Problem(f"{got} with context=1 does nothing", rule, "context=2 or more, or leave zero_over out")]
    if parallel.pipe > 1:
        fix = "pipe=1, or zero_over='fsdp'"
        return [Problem(f"{got} with pipe={parallel.pipe}", f"{rule} where there is no pipeline", fix)]
    if parallel.exchange.per_replica:
        fix = "zero_over='fsdp', or leave the exchange out"
        return [Problem(f"{got} with exchange {parallel.exchange}", f"{rule} where replicas step together", fix)]
    return []


def idle(layout: Layout) -> list[Problem]:
    """Returns a problem if no array is sharded, and one for each large unsharded parameter."""
    shared = layout.parallel.stage and layout.sizes["fsdp"] > 1
    nothing = unsplit_axis_problems(layout, "fsdp", "that it divides") if shared else []
    return nothing + model_problems(layout)


SHARDING = Technique(axis="fsdp", problems=problems, idle=idle)
