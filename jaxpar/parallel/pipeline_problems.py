"""Checks the options of a pipeline, as far as they do not depend on model and devices."""

from jaxpar.errors import Problem
from jaxpar.parallel.declaration import FOUND, Parallel, Pipeline
from jaxpar.pipeline.tables.schedule import Schedule


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `Parallel.pipeline`, of which some option is given."""
    errors = _key_problems(parallel.pipeline, parallel.pipe)
    if parallel.pipeline.stages or parallel.pipeline.replicas:
        errors += _stage_problems(parallel.pipeline, parallel.pipe)
    if parallel.pipeline.gather == "tick" and parallel.stage < 3:
        errors.append(
            Problem(
                f'gather="tick" with fsdp={parallel.fsdp}, zero={parallel.stage}',
                "it says when zero=3 gathers the layers that `fsdp` shards",
                'fsdp=2 or more and zero=3, or gather="step"',
            )
        )
    if parallel.pipeline.head == "spread" and parallel.stage == 2:
        errors.append(
            Problem(
                f'head="spread" with fsdp={parallel.fsdp}, zero=2',
                "zero=2 adds up shards of gradients, and those of a head that is spread are added up whole",
                'zero=1 or zero=3, or head="last"',
            )
        )
    return errors


def _key_problems(pipeline: Pipeline, stages: int) -> list[Problem]:
    problems = []
    if stages == 1 and pipeline != Pipeline():
        problems.append(
            Problem(
                "a pipeline with pipe=1",
                "[parallel.pipeline] says how the axis `pipe` is run",
                "pipe=2 or more, or leave the pipeline out",
            )
        )
    for key in ("microbatches", "chunks"):
        if type(getattr(pipeline, key)) is not int or getattr(pipeline, key) < 0:
            problems.append(Problem(f"{key}={getattr(pipeline, key)!r}", f"{key} is a whole number, or 0", f"{key}=0"))
    if not isinstance(pipeline.layers, tuple | list) or any(type(n) is not int or n < 1 for n in pipeline.layers):
        problems.append(Problem(f"layers={pipeline.layers!r}", "the layers of each stage, at least one", "layers=()"))
    elif pipeline.layers and stages > 1 and len(pipeline.layers) != stages:
        problems.append(
            Problem(
                f"layers={tuple(pipeline.layers)} for pipe={stages}",
                "there is one number of layers for each stage",
                f"{stages} numbers, or layers=() for as many on each",
            )
        )
    if not isinstance(pipeline.stack, str):
        problems.append(Problem(f"stack={pipeline.stack!r:.60}", "stack is the start of a path", 'stack="text/blocks"'))
    for key, choices in (
        ("keep", ("inputs", "residuals")),
        ("gather", ("step", "tick")),
        ("head", ("auto", "last", "spread")),
        ("weights", ("flush", "stash", "vertical", "2bw", "none")),
    ):
        if getattr(pipeline, key) not in choices:
            problems.append(
                Problem(f"{key}={getattr(pipeline, key)!r}", f"{key} is {', '.join(choices)}", f'{key}="{choices[0]}"')
            )
    if pipeline.head == "spread" and (pipeline.weights != "flush" or pipeline.gather == "tick"):
        problems.append(
            Problem(
                f'head="spread" with weights={pipeline.weights!r}, gather={pipeline.gather!r}',
                'a head is spread where weights="flush" and gather="step"',
                'head="last"',
            )
        )
    return problems


def _stage_problems(pipeline: Pipeline, pipe: int) -> list[Problem]:
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
    return wrong or _replica_problems(pipeline, pipe) + _option_problems(pipeline)


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


def _replica_problems(pipeline: Pipeline, pipe: int) -> list[Problem]:
    replicas, errors = tuple(pipeline.replicas), []
    if replicas and sum(replicas) != pipe:
        rule = "the devices of all stages are those of the axis pipe"
        errors.append(Problem(f"replicas={replicas} on pipe={pipe}", rule, f"pipe={sum(replicas)}"))
    if pipeline.microbatches % pipeline.group:
        rule = "a tick handles a group of microbatches, as many as the least common multiple of the numbers of replicas"
        fix = f"microbatches={-(-pipeline.microbatches // pipeline.group) * pipeline.group}"
        errors.append(Problem(f"microbatches={pipeline.microbatches} with replicas={replicas}", rule, fix))
    return errors


def _option_problems(pipeline: Pipeline) -> list[Problem]:
    stages = pipeline.stages if pipeline.stages == FOUND else tuple(pipeline.stages)
    given = {
        "layers": bool(pipeline.layers),
        "stack": bool(pipeline.stack),
        f"gather={pipeline.gather!r}": pipeline.gather != "step",
        f"head={pipeline.head!r}": pipeline.head == "spread",
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
