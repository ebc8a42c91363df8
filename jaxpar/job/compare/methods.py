"""Methods as they are written on the command line: a name, and after a colon its one number.

    sync,local:20,diloco:20,sign,topk:0.01,ssp:3

Exchanges take what the job says of them, if it has the same one; the number is their first of `NUMBERS`.
"""

from dataclasses import dataclass, fields, replace

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.exchange.base import Exchange
from jaxpar.exchange.clock.elastic import AsynchronousEasgd
from jaxpar.exchange.clock.events import Simulated
from jaxpar.exchange.clock.table import SIMULATED, simulated
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.file.schema import Job

NUMBERS = ("every", "share", "bits", "rank")  # settings that a number after the colon may be


@dataclass(frozen=True)
class Method:
    """A way to agree.

    Attributes:
      name: As it was written.
      how: An exchange, which runs, or a method on the virtual clock.
    """

    name: str
    how: Exchange | Simulated | AsynchronousEasgd

    @property
    def runs(self) -> bool:
        """Whether it runs; else it is simulated."""
        return isinstance(self.how, Exchange)


def parse(text: str, job: Job) -> list[Method]:
    """Returns the methods that are asked for.

    Raises:
      JaxparError: With every one that there is not, or that is written in another way.
    """
    found, problems = [], []
    names = [name.strip() for name in text.split(",")]
    for name in names:
        try:
            found.append(Method(name, _one(name, job)))
        except JaxparError as error:
            problems += error.problems
    problems += [
        Problem(f"method {name} twice", "each method is trained once", f"one {name}")
        for name in {name for name in names if names.count(name) > 1}
    ]
    if problems:
        raise JaxparError(*problems)
    return found


def _one(text: str, job: Job) -> Exchange | Simulated | AsynchronousEasgd:
    name, _, number = text.partition(":")
    if name in SIMULATED:
        return simulated(name, number)
    if text == "sync":
        return AllReduce()
    if name not in EXCHANGES:
        known = ("sync", *EXCHANGES, *SIMULATED)
        raise refuse(f"method {text!r:.60}", rule=f"one of {', '.join(known)}", fix=nearest(name, known))
    kind, own = EXCHANGES[name], job.parallel.exchange
    settings = {each.name for each in fields(kind)}
    made = own if own.name == name else kind()
    if not number:
        return made
    key = next((key for key in NUMBERS if key in settings), None)
    if key is None:
        raise refuse(f"method {text}", rule=f"{name} takes no number", fix=name)
    try:
        return replace(made, **{key: float(number) if key == "share" else int(number)})
    except JaxparError:
        raise
    except ValueError as error:
        raise refuse(f"method {text}", rule=f"{key} is a number", fix=f"{name}:{getattr(made, key)}") from error
