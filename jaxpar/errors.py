"""Errors that say what went wrong, the rule, and the way out.

JaxparError: mesh axes fsdp=4 x tensor=3 need 12 devices, 8 are visible (cpu).
  rule: the product of the axis sizes equals the number of devices
  fix:  tensor=2, or fsdp=-1 to infer it
"""

import difflib
import math
import re
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

LOST = 75  # status of a process that ended because of another: worth another attempt (EX_TEMPFAIL)
FEW = 20  # problems of one kind that are listed one by one
# saved and stopped by a signal; as shells count
STOPPED = {
    name: 128 + signal.Signals[name] for name in ("SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGXCPU")
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with the user's input.

    Attributes:
      got: The input, as the user wrote it.
      rule: The rule it breaks.
      fix: The input to try instead.
    """

    got: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return plain(f"{self.got}\n  rule: {self.rule}\n  fix:  {self.fix}")


class JaxparError(ValueError):
    """The one error jaxpar raises for input it refuses; carries every problem found at once."""

    status = 1  # exit status of a command that ends with it

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Keywords:
    """Base of the dataclasses that users write with keywords: one that a class does not have is refused."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any):
        """Returns the empty instance, for `__init__`.

        Raises:
          JaxparError: With every keyword that the class does not have, and values without a keyword.
        """
        known = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
        rule = f"{cls.__name__} takes keywords: {', '.join(known)}"
        problems = [Problem(f"{cls.__name__}({value!r:.60})", rule, f"{known[0]}={value!r:.60}") for value in args]
        problems += [
            Problem(f"{cls.__name__}({key}={kwargs[key]!r:.60})", rule, nearest(key, known))
            for key in kwargs
            if key not in known
        ]
        if problems:
            raise JaxparError(*problems)
        return super().__new__(cls)


def plain(text: str) -> str:
    """Returns a text without control characters, which a terminal would obey; lines and tabs stay."""
    return text.translate(_SHOWN)


_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def first_problems(names: Sequence[str], problem: Callable[[str], Problem]) -> list[Problem]:
    """Returns one problem for each of the first 20 names, and a single one that counts the others."""
    made = [problem(name) for name in names[:FEW]]
    if len(names) > FEW:
        made.append(Problem(f"{len(names) - FEW} more like them", made[-1].rule, "leave them out"))
    return made


def refuse(got: str, *, rule: str, fix: str) -> JaxparError:
    """Returns the error for a single problem, to be raised."""
    return JaxparError(Problem(got, rule, fix))


@contextmanager
def users_code(what: str, *, rule: str, fix: str) -> Iterator[None]:
    """Turns whatever a user's own code raises into a refusal that begins with the line; jaxpar's refusals pass.

    The one place that catches everything, because a user's code may raise anything; nothing is
    swallowed: the error is raised again, with its cause. A collective of `pmap` has a rule and a fix of its own.
    """
    try:
        yield
    except JaxparError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, NameError) and "unbound axis name" in str(error):  # JAX's, of `lax.pmean` and its like
            rule = "a model and its loss see all examples of the batch, so that there are no replicas to average over"
            fix = "no pmean, and jnp.mean or jnp.sum over the batch, with a weight for padding, where a psum stands"
        raise refuse(f"{users_line(error)}{what}: {describe_exception(error)}", rule=rule, fix=fix) from error


def users_line(error: BaseException) -> str:
    """Returns the line of the user's code that raised, `loss.py, line 8: x = a @ b` on a line of its own; or ""."""
    lines = _users(error)
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}: {lines[-1].line}\n  " if lines else ""


def _users(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of code that is neither jaxpar's, nor a package's, nor Python's."""
    known = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<")
    return [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(known)]


def describe_exception(error: BaseException) -> str:
    """Returns an exception as one line of text, with the file and line of the user's code that raised it."""
    text = [line for line in str(error).strip().splitlines() if line.strip()]
    more = bool(text) and text[0].endswith(":")  # as of a scan, whose second line says which types differ
    kept = [*text[: 1 + more], *(line for line in text[1 + more :] if _LISTING.fullmatch(line.strip()))]
    what = f"no entry {error}" if isinstance(error, KeyError) else " ".join(each.strip() for each in kept)
    if type(error).__name__ not in ("KeyError", "TypeError", "ValueError", "OSError"):
        what = f"{type(error).__name__}: {what}".rstrip(": ")
    lines = _users(error)
    return (
        f"{what or type(error).__name__} ({Path(lines[-1].filename).name}, line {lines[-1].lineno})"
        if lines
        else what or type(error).__name__
    )


_LISTING = re.compile(r"[A-Z][\w ]{0,30}: \[.{0,90}\]")  # Transforms keys: ['adam', 'sgd'], as optax lists labels


@contextmanager
def reading(
    path: Path, *, rule: str, fix: str, say: Callable[[BaseException], str] = describe_exception
) -> Iterator[None]:
    """Turns whatever is wrong with a file that jaxpar wrote itself into a refusal; jaxpar's refusals pass.

    Args:
      path: The file that is read inside this context.
      rule: Rule of the error: the purpose of the file.
      fix: How to go on without the file.
      say: Describes an exception in one line.

    Raises:
      JaxparError: If it cannot be read, is not of its format, or holds something else.
    """
    try:
        yield
    except JaxparError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise refuse(f"{path} is damaged: {say(error)}", rule=rule, fix=fix) from error


def nearest(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Returns how a misspelt `word` was probably meant: "did you mean 'x'?"; else `otherwise`, or the known words."""
    choices = sorted(known)
    # in small letters, so that adamW is nearer to adamw than to adam; of names that differ in case alone, the first
    names = {choice.lower(): choice for choice in reversed(choices)}
    close = [names[each] for each in difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=0.6)]
    return f"did you mean {close[0]!r}?" if close else otherwise or f"one of: {', '.join(choices)}"


def nearest_divisor(number: int, near: int, *, good: Callable[[int], bool] = lambda divisor: True) -> int | None:
    """Returns the divisor of `number` that is nearest to `near`, the lower of two; None if none is within twice.

    Args:
      number: A positive number.
      near: The number that was asked for.
      good: A further condition on the divisor.

    >>> nearest_divisor(4096, 7), nearest_divisor(4099, 7)
    (8, None)
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    close = [n for n in (*small, *(number // n for n in small)) if near <= 2 * n <= 4 * near and good(n)]
    return min(close, key=lambda n: (abs(n - near), n), default=None)


def check_ranges(
    spec: object, section: str, ranges: Mapping[str, tuple[float, float]], *, below: Iterable[str] = ()
) -> None:
    """Checks that values of a dataclass are numbers in their ranges, all at once; NaN is in no range.

    Args:
      spec: The dataclass.
      section: The table of the job file that it was read from, which prefixes its keys in the error; "" for none.
      ranges: Key to (lowest, highest), both allowed.
      below: The keys whose highest value is itself not allowed.

    Raises:
      JaxparError: With every value that is no number, or out of its range.
    """
    problems = []
    defaults = {field.name: field.default for field in fields(spec)}  # pyright: ignore[reportArgumentType]
    for key, (low, high) in ranges.items():
        value = getattr(spec, key)
        number = issubclass(type(value), Real)  # numpy's numbers too
        if not number or not low <= value <= high or (key in below and value == high):
            usual = defaults.get(key, MISSING)
            rule = (
                f"{key} is a number"
                if not number
                else f"{key} is at least {low}"
                if high >= 2**31 - 1 and value < low
                else f"{key} is within {low}..{high}{', below the latter' * (key in below)}"
            )
            problems.append(
                Problem(
                    f"{section}{'.' * bool(section)}{key} = {value!r}",
                    rule,
                    f"{key} = {usual if usual is not MISSING and low <= usual <= high else low}",
                )
            )
    if problems:
        raise JaxparError(*problems)


def differences(found: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], *, of: str) -> dict[str, list[str]]:
    """Returns how arrays differ from the shapes that are wanted, as {kind of difference: names}.

    Args:
      found: Name to an array, or anything else with a `shape`.
      wanted: Name to shape.
      of: Owner of the wanted arrays, as in "not of the model".

    >>> import numpy as np
    >>> differences({"a": np.ones(2), "b": np.ones(3)}, {"a": (2, 1), "c": (4,)}, of="the model")
    {'missing': ['c'], 'not of the model': ['b'], 'of another shape': ['a [2], not [2, 1]']}
    """
    each = {
        "missing": [name for name in wanted if name not in found],
        f"not of {of}": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {list(found[name].shape)}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name].shape) != tuple(shape)
        ],
    }
    return {what: names for what, names in each.items() if names}
