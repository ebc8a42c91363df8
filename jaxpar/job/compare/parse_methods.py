"""Parses methods of the command line (a name and, after a colon, one number), and finds a batch that all can divide.

    sync,local:20,diloco:20,sign,topk:0.01,ssp:3

An exchange takes its settings from the job if the job uses the same one; the number is its first setting in `NUMBERS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.exchange.clock.base import SimulatedRun
from jaxpar.exchange.clock.methods import SIMULATED, parse_method
from jaxpar.exchange.clock.parameter_servers import AsynchronousEasgd
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.check import device_count
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import batch_factors
from jaxpar.mesh.axes import infer_sizes

NUMBERS = ("every", "share", "bits", "rank")  # settings that the number after the colon may set


@dataclass(frozen=True)
class Method:
    """A method by which replicas exchange gradients or parameters.

    Attributes:
      name: The text on the command line.
      algorithm: An exchange, which runs, or a method simulated on a virtual clock.
    """

    name: str
    algorithm: Exchange | SimulatedRun | AsynchronousEasgd

    @property
    def runs(self) -> bool:
        """Whether the method runs on the devices; otherwise it is simulated on a virtual clock."""
        return isinstance(self.algorithm, Exchange)


def parse(text: str, job: Job) -> list[Method]:
    """Parses a comma-separated list of methods.

    Raises:
      JaxparError: If methods are unknown, malformed or repeated; the message has all of them.
    """
    methods, problems = [], []
    names = [name.strip() for name in text.split(",")]
    for name in names:
        try:
            methods.append(Method(name, _parse_method(name, job)))
        except JaxparError as error:
            problems += error.problems
    problems += [
        Problem(f"method {name} twice", "each method is trained once", f"one {name}")
        for name in {name for name in names if names.count(name) > 1}
    ]
    if problems:
        raise JaxparError(*problems)
    return methods


def _parse_method(text: str, job: Job) -> Exchange | SimulatedRun | AsynchronousEasgd:
    name, _, number = text.partition(":")
    if name in SIMULATED:
        return parse_method(name, number)
    if text == "sync":
        return AllReduce()
    if name not in EXCHANGES:
        methods = ("sync", *EXCHANGES, *SIMULATED)
        raise refuse(f"method {text!r:.60}", rule=f"one of {', '.join(methods)}", fix=suggest(name, methods))
    kind, job_exchange = EXCHANGES[name], job.parallel.exchange
    settings = {item.name for item in fields(kind)}
    exchange = job_exchange if job_exchange.name == name else kind()
    if not number:
        return exchange
    key = next((key for key in NUMBERS if key in settings), None)
    if key is None:
        raise refuse(f"method {text}", rule=f"{name} takes no number", fix=name)
    try:
        return replace(exchange, **{key: float(number) if key == "share" else int(number)})
    except JaxparError:
        raise
    except ValueError as error:
        raise refuse(f"method {text}", rule=f"{key} is a number", fix=f"{name}:{getattr(exchange, key)}") from error


def divisor(job: Job, method: Method) -> int:
    """Returns the number that divides the global batch if a method trains the job.

    Raises:
      JaxparError: If the mesh does not fit the devices, or a simulated method the number of replicas.
    """
    sizes, algorithm = infer_sizes(job.parallel.sizes, device_count(job)), method.algorithm
    if isinstance(algorithm, Exchange):
        return math.prod(batch_factors(job, sizes, replace(job.parallel, exchange=algorithm)).values())
    # a share of the batch is trained on by one replica, which splits it over its own devices
    inside = batch_factors(job, sizes, replace(job.parallel, exchange=AllReduce()))
    return algorithm.shares(sizes["data"]) * math.prod(size for name, size in inside.items() if name != "data")


def fit_batch(job: Job, methods: Sequence[Method]) -> tuple[Job, list[Problem]]:
    """Returns the job with the next global batch that all methods divide, and a problem if its own is another.

    Raises:
      JaxparError: If the mesh does not fit the devices, or a simulated method the number of replicas.
    """
    divisors = {method.name: divisor(job, method) for method in methods}
    common, size = math.lcm(*divisors.values()), job.train.global_batch
    batch = -(-size // common) * common
    if batch == size:
        return job, []
    indivisible = [f"{name} ({number})" for name, number in divisors.items() if size % number]
    rule = f"the batch is divided by the number of each method, so by {common} for all that are compared"
    problem = Problem(
        f"train.global_batch = {size} with {', '.join(indivisible)}", rule, f"train.global_batch = {batch}"
    )
    return replace(job, train=replace(job.train, global_batch=batch)), [problem]
