"""Checks `Pipeline.stages` and `Pipeline.replicas`: the pieces and the devices of stages of different programs."""

from jaxpar.errors import Problem
from jaxpar.parallel.pipeline_options import FOUND, Pipeline
from jaxpar.pipeline.tables.schedule import Schedule


def problems(pipeline: Pipeline, pipe: int) -> list[Problem]:
    """Returns the problems of the options of stages of pieces, on so many devices."""
    if not pipeline.stages:
        rule = "replicas are of stages of pieces; `data` replicates all stages of equal layers alike"
        return [Problem(f"replicas={pipeline.replicas!r:.60} without stages", rule, "stages=(3, 5), or data=2")]
    pieces = () if pipeline.stages == FOUND else pipeline.stages
    wrong = [
        Problem(f"{key}={numbers!r:.60}", f"{what} of each stage, at least one", fix)
        for key, numbers, what, fix in (
            ("stages", pieces, "the pieces", 'stages=(3, 5), or stages="found"'),
            ("replicas", pipeline.replicas, "the devices", "replicas=(3, 1)"),
        )
        if not isinstance(numbers, tuple | list) or any(type(n) is not int or n < 1 for n in numbers)
    ]
    return wrong or _of_replicas(pipeline, pipe) + _of_options(pipeline)


def number_problems(pipeline: Pipeline, schedule: Schedule) -> list[Problem]:
    """Returns the problem of a number of stages that is not the schedule's."""
    if pipeline.stages == FOUND or len(pipeline.stages) == schedule.parts:
        return []
    chunks = schedule.chunks
    given = f"{schedule.stages} stages" if pipeline.replicas else f"pipe={schedule.stages}"
    other = "replicas of as many stages" if pipeline.replicas else f"pipe={len(pipeline.stages)}"
    return [
        Problem(
            f"stages={tuple(pipeline.stages)} for {given}" + f" x chunks={chunks}" * (chunks > 1),
            "there is one number of pieces for each stage" + ", and for each chunk of it" * (chunks > 1),
            f"{schedule.parts} numbers, or {other}",
        )
    ]


def _of_replicas(pipeline: Pipeline, pipe: int) -> list[Problem]:
    replicas, errors = tuple(pipeline.replicas), []
    if replicas and sum(replicas) != pipe:
        rule = "the devices of all stages are those of the axis pipe"
        errors.append(Problem(f"replicas={replicas} on pipe={pipe}", rule, f"pipe={sum(replicas)}"))
    if pipeline.microbatches % pipeline.group:
        rule = "a tick handles a group of microbatches, as many as the least common multiple of the numbers of replicas"
        fix = f"microbatches={-(-pipeline.microbatches // pipeline.group) * pipeline.group}"
        errors.append(Problem(f"microbatches={pipeline.microbatches} with replicas={replicas}", rule, fix))
    return errors


def _of_options(pipeline: Pipeline) -> list[Problem]:
    stages = pipeline.stages if pipeline.stages == FOUND else tuple(pipeline.stages)
    given = {
        "layers": bool(pipeline.layers),
        "stack": bool(pipeline.stack),
        f"gather={pipeline.gather!r}": pipeline.gather != "step",
        f"head={pipeline.head!r}": pipeline.head == "spread",
        f"weights={pipeline.weights!r}": pipeline.weights != "flush",
    }
    return [
        Problem(
            f"stages={stages} with {key}",
            "this is for stages of equal layers alone",
            f"{key} left out, or stages=()",
        )
        for key, is_given in given.items()
        if is_given
    ]
