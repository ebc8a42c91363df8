"""Errors that state what went wrong, the rule, and a fix.

JaxparError: mesh axes fsdp=4 x tensor=3 need 12 devices, 8 are visible (cpu).
  rule: the product of the axis sizes equals the number of devices
  fix:  tensor=2, or fsdp=-1 to infer it
"""

import math
import re
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

LOST = 75  # exit status of a process that ended because another failed: worth a retry (EX_TEMPFAIL)
FEW = 20  # problems of one kind that are listed one by one
# exit statuses of a run that saved and stopped by a signal, 128 + number as in shells
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
        return escape_control(f"{self.got}\n  rule: {self.rule}\n  fix:  {self.fix}")


class JaxparError(ValueError):
    """The error that jaxpar raises for input that it refuses, with all problems at once."""

    status = 1  # exit status of a command that ends with this error

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Keywords:
    """Base of the keyword-only dataclasses for users: refuses unknown keywords and positional values."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any):
        """Returns the empty instance, for `__init__`.

        Raises:
          JaxparError: With every keyword that the class does not have, and values without a keyword.
        """
        names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
        rule = f"{cls.__name__} takes keywords: {', '.join(names)}"
        problems = [Problem(f"{cls.__name__}({value!r:.60})", rule, f"{names[0]}={value!r:.60}") for value in args]
        problems += [
            Problem(f"{cls.__name__}({key}={kwargs[key]!r:.60})", rule, cls.keyword_fix(key, kwargs[key], names))
            for key in kwargs
            if key not in names
        ]
        if problems:
            raise JaxparError(*problems)
        return super().__new__(cls)

    @classmethod
    def keyword_fix(cls, key: str, value: object, names: Sequence[str]) -> str:
        """Returns the fix for a keyword that the class does not have, of the names that it has."""
        return suggest(key, names)

    def __repr__(self) -> str:
        """Returns the class with the fields that differ from their defaults; for a dataclass with repr=False."""
        options = [(option, getattr(self, option.name)) for option in fields(self)]  # pyright: ignore[reportArgumentType]
        changed = ", ".join(f"{option.name}={value!r}" for option, value in options if value != _default(option))
        return f"{type(self).__name__}({changed})"


def _default(option: Field) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def escape_control(text: str) -> str:
    """Escapes control characters, which a terminal would execute; keeps newlines and tabs."""
    return text.translate(_SHOWN)


_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def first_problems(names: Sequence[str], problem: Callable[[str], Problem]) -> list[Problem]:
    """Returns a problem for each of the first 20 names, and one that counts the others."""
    problems = [problem(name) for name in names[:FEW]]
    if len(names) > FEW:
        problems.append(Problem(f"{len(names) - FEW} more like them", problems[-1].rule, "leave them out"))
    return problems


def refuse(got: str, *, rule: str, fix: str) -> JaxparError:
    """Returns a `JaxparError` of a single problem, for the caller to raise."""
    return JaxparError(Problem(got, rule, fix))


@contextmanager
def user_code_errors(what: str, *, rule: str, fix: str) -> Iterator[None]:
    """Turns any error of the user's own code into a `JaxparError` that begins with the user's line.

    Catches everything, because a user's code may raise anything, and raises it again with its cause; a `JaxparError`
    passes unchanged. Collectives of `pmap`, and lists of modules in NNX, have their own rule and fix.
    """
    try:
        yield
    except JaxparError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, NameError) and "unbound axis name" in str(error):  # JAX's, of `lax.pmean` and its like
            rule = "a model and its loss see all examples of the batch, so that there are no replicas to average over"
            fix = "no pmean, and jnp.mean or jnp.sum over the batch, with a weight for padding, where a psum stands"
        if found := _STATIC.search(str(error)):
            kind, name = found.groups()
            rule = f"since Flax 0.12 an NNX module holds modules and arrays in an nnx.List or nnx.Dict, not in a {kind}"
            fix = f"self.{name} = nnx.{'Dict' if kind == 'dict' else 'List'}(...) where it is a {kind}"
        raise refuse(f"{users_line(error)}{what}: {describe_exception(error)}", rule=rule, fix=fix) from error


_STATIC = re.compile(r"<class '(list|dict|tuple)'>'? (?:in|assigned to) static attribute '(\w+)'")  # Flax's words


def users_line(error: BaseException) -> str:
    """Returns the user's line that raised, such as `loss.py, line 8: x = a @ b` and a line break; or ""."""
    lines = _users(error)
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}: {lines[-1].line}\n  " if lines else ""


def _users(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the user's code: not of jaxpar, an installed package or Python."""
    foreign = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(foreign)]
    # where JAX transforms a traced program, the cause of its error has the line that was traced
    return _users(error.__cause__) if not frames and error.__cause__ is not None else frames


def describe_exception(error: BaseException) -> str:
    """Describes an exception in one line, with the file and line of the user's code that raised it."""
    text = [line for line in str(error).strip().splitlines() if line.strip()]
    continues = bool(text) and text[0].endswith(":")  # as of a scan, whose second line has the types that differ
    parts = [*text[: 1 + continues], *(line for line in text[1 + continues :] if _LISTING.fullmatch(line.strip()))]
    description = f"no entry {error}" if isinstance(error, KeyError) else " ".join(part.strip() for part in parts)
    if type(error).__name__ not in ("KeyError", "TypeError", "ValueError", "OSError"):
        description = f"{type(error).__name__}: {description}".rstrip(": ")
    lines = _users(error)
    return (
        f"{description or type(error).__name__} ({Path(lines[-1].filename).name}, line {lines[-1].lineno})"
        if lines
        else description or type(error).__name__
    )


_LISTING = re.compile(r"[A-Z][\w ]{0,30}: \[.{0,90}\]")  # Transforms keys: ['adam', 'sgd'], as optax lists labels


@contextmanager
def file_errors(
    path: Path, *, rule: str, fix: str, say: Callable[[BaseException], str] = describe_exception
) -> Iterator[None]:
    """Turns any error while reading a file of jaxpar's own into a `JaxparError`; a `JaxparError` passes unchanged.

    Args:
      path: The file that is read inside this context.
      rule: Rule of the error: the purpose of the file.
      fix: How to go on without the file.
      say: Describes an exception in one line.

    Raises:
      JaxparError: If the file cannot be read, or has another format or content.
    """
    try:
        yield
    except JaxparError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise refuse(f"{path} is damaged: {say(error)}", rule=rule, fix=fix) from error


def suggest(word: str, words: Iterable[str], *, otherwise: str = "") -> str:
    """Suggests a correction of a misspelt or foreign `word`: "did you mean 'x'?"; else `otherwise`, or the words."""
    from jaxpar.other_names import find_name  # only errors need it

    choices = sorted(words)
    name = find_name(str(word), choices)
    return f"did you mean {name!r}?" if name else otherwise or f"one of: {', '.join(choices)}"


def nearest_divisor(number: int, near: int, *, good: Callable[[int], bool] = lambda divisor: True) -> int | None:
    """Returns the divisor of `number` nearest to `near`, the lower of two; None if none is within a factor of 2.

    Args:
      number: A positive number.
      near: The desired divisor.
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
      section: Table of the job file with the keys, the prefix of keys in the error; "" for none.
      ranges: Key to (lowest, highest), both allowed.
      below: Keys whose highest value is excluded.

    Raises:
      JaxparError: With every value that is no number, or out of range.
    """
    problems = []
    defaults = {field.name: field.default for field in fields(spec)}  # pyright: ignore[reportArgumentType]
    for key, (low, high) in ranges.items():
        value = getattr(spec, key)
        number = issubclass(type(value), Real)  # numpy's numbers too
        if not number or not low <= value <= high or (key in below and value == high):
            default = defaults.get(key, MISSING)
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
                    f"{key} = {default if default is not MISSING and low <= default <= high else low}",
                )
            )
    if problems:
        raise JaxparError(*problems)


def shape_differences(
    arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, owner: str
) -> dict[str, list[str]]:
    """Compares arrays with expected shapes; returns {kind of difference: names}.

    Args:
      arrays: Name to an array, or anything else with a `shape`.
      shapes: Name to shape.
      owner: Owner of the expected arrays, as in "not of the model".

    >>> import numpy as np
    >>> shape_differences({"a": np.ones(2), "b": np.ones(3)}, {"a": (2, 1), "c": (4,)}, owner="the model")
    {'missing': ['c'], 'not of the model': ['b'], 'of another shape': ['a [2], not [2, 1]']}
    """
    kinds = {
        "missing": [name for name in shapes if name not in arrays],
        f"not of {owner}": [name for name in arrays if name not in shapes],
        "of another shape": [
            f"{name} {list(arrays[name].shape)}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in arrays and tuple(arrays[name].shape) != tuple(shape)
        ],
    }
    return {kind: names for kind, names in kinds.items() if names}
