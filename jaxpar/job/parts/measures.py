"""What a job's evaluations say beside the loss: measures that are built in, or the user's own."""

from collections.abc import Callable

from jaxpar.errors import nearest, refuse
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job
from jaxpar.step.measures.functions import DERIVED, MEASURES

KEY = "metrics.evaluate"


def resolve_measures(job: Job) -> dict[str, Callable]:
    """Returns the functions of (model, batch) of a job, by the names of their metrics; `classify` has its accuracy.

    Raises:
      JaxparError: If there is no such function, or two have one name.
    """
    found: dict[str, Callable] = {}
    for name in job.metrics.evaluate:
        if name in DERIVED or (name == "accuracy" and job.train.loss == "classify"):
            continue
        said = name.rpartition(":")[2].rpartition(".")[2]
        if said in found or (said != name and said in (*DERIVED, *MEASURES)):
            raise refuse(
                f"{KEY}: {name!r}",
                rule="each metric has a name of its own",
                fix="a function of another name, or one of the two alone",
            )
        found[said] = _function(job, name)
    return found


def derived_of(job: Job) -> tuple[str, ...]:
    """Returns the names of a job's metrics that follow from its loss.

    Raises:
      JaxparError: If bits per byte are asked for, and a token is no byte.
    """
    names = tuple(name for name in job.metrics.evaluate if name in DERIVED)
    if "bits_per_byte" in names and not (job.data.is_text and job.data.tokenizer == "bytes"):
        raise refuse(
            f'{KEY} = ["bits_per_byte"] with {job.data.tokenizer if job.data.is_text else job.data.source}',
            rule="bits per byte are those per token where a token is a byte of text",
            fix='"perplexity", or data.tokenizer = "bytes"',
        )
    return names


def sets_of(job: Job) -> tuple[str, ...]:
    """Returns the names of the sets that a job evaluates: "" are the examples that are held out, if there are any."""
    held = job.data.held_out > 0 if ":" not in job.data.source or not job.data.sets else True
    return (*[""] * held, *job.data.sets)


def _function(job: Job, name: str) -> Callable:
    if ":" not in name:
        if name not in MEASURES:
            known = [*MEASURES, *DERIVED]
            rule = f'a metric is {", ".join(known)}, or "package.module:function" of (model, batch) to (sum, count)'
            raise refuse(f"{KEY}: {name!r}", rule=rule, fix=nearest(name, known))
        return MEASURES[name]
    found = import_object(name, KEY, allowed=job.allow_import)
    if not callable(found):
        raise refuse(
            f"{KEY}: {name!r} is a {type(found).__name__}",
            rule="a metric is a function of (model, batch) to (sum, count)",
            fix='"my_module:my_function", the name of such a function',
        )
    return found
