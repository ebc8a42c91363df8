"""How an error writes an option of a plan: as a flag of `jaxpar plan`, or as an argument of `jp.plan`."""

from collections.abc import Callable

OptionText = Callable[[str, object], str]


def flag_text(name: str, value: object) -> str:
    """Formats an option as it is typed in a shell.

    >>> flag_text("per_node", 8)
    '--per-node 8'
    """
    return f"--{name.replace('_', '-')} {value}"


def argument_text(name: str, value: object) -> str:
    """Formats an option as it is written in Python.

    >>> argument_text("memory", "70GiB")
    "memory='70GiB'"
    """
    return f"{name}={value!r:.60}"
