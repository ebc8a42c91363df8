"""Checks `Pipeline.stages` and `Pipeline.replicas`: the pieces and the devices of stages of different programs."""

from jaxpar.errors import Problem
from jaxpar.parallel.pipeline_options import Pipeline


def problems(pipeline: Pipeline, pipe: int) -> list[Problem]:
    """Returns the problems of the numbers of pieces and replicas of a pipeline on so many devices."""
    if not pipeline.stages:
        rule = "replicas are of stages of pieces; `data` replicates all stages of equal layers alike"
        return [Problem(f"replicas={pipeline.replicas!r:.60} without stages", rule, "stages=(3, 5), or data=2")]
    wrong = [
        Problem(f"{key}={numbers!r}", f"{what} of each stage, at least one", f"{key}=(3, 5)")
        for key, numbers, what in (
            ("stages", pipeline.stages, "the pieces"),
            ("replicas", pipeline.replicas, "the devices"),
        )
        if not isinstance(numbers, tuple | list) or any(type(n) is not int or n < 1 for n in numbers)
    ]
    return wrong or _of_numbers(pipeline, pipe) + _of_options(pipeline)


def _of_numbers(pipeline: Pipeline, pipe: int) -> list[Problem]:
    pieces, replicas, errors = f"stages={tuple(pipeline.stages)}", tuple(pipeline.replicas), []
    count, chunks = len(replicas) or pipe, pipeline.chunks or 1
    if replicas and sum(replicas) != pipe:
        rule = "the devices of all stages are those of the axis pipe"
        errors.append(Problem(f"replicas={replicas} on pipe={pipe}", rule, f"pipe={sum(replicas)}"))
    if len(pipeline.stages) != count * chunks:
        rule = "there is one number of pieces for each stage" + (", and for each chunk of it" if chunks > 1 else "")
        given = f"{count} stages" if replicas else f"pipe={pipe}"
        other = "replicas of as many stages" if replicas else f"pipe={len(pipeline.stages)}"
        fix = f"{count * chunks} numbers, or {other}"
        errors.append(Problem(f"{pieces} for {given}" + f" x chunks={chunks}" * (chunks > 1), rule, fix))
    if pipeline.microbatches % pipeline.group:
        rule = "a tick handles a group of microbatches, as many as the least common multiple of the numbers of replicas"
        fix = f"microbatches={-(-pipeline.microbatches // pipeline.group) * pipeline.group}"
        errors.append(Problem(f"microbatches={pipeline.microbatches} with replicas={replicas}", rule, fix))
    return errors


def _of_options(pipeline: Pipeline) -> list[Problem]:
    given = {
        "layers": bool(pipeline.layers),
        "stack": bool(pipeline.stack),
        f"gather={pipeline.gather!r}": pipeline.gather != "step",
        f"head={pipeline.head!r}": pipeline.head == "spread",
        f"keep={pipeline.keep!r}": pipeline.keep != "inputs",
        f"weights={pipeline.weights!r}": pipeline.weights != "flush",
    }
    return [
        Problem(
            f"stages={tuple(pipeline.stages)} with {key}",
            "this is for stages of equal layers alone",
            f"{key} left out, or stages=()",
        )
        for key, is_given in given.items()
        if is_given
    ]
