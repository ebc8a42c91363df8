"""The job files that jaxpar ships, so that `configs/quickstart.toml` names one in any folder."""

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "configs"  # in a checkout, a link to its configs/


def shipped_job(path: Path) -> Path | None:
    """Returns the shipped file that a path below `configs/` names; None if the path exists, or no such file does."""
    shipped = SHIPPED.joinpath(*path.parts[1:])
    return None if path.exists() or path.parts[:1] != ("configs",) or not shipped.is_file() else shipped


def replacement_note(name: str | Path) -> str:
    """Reports that a shipped file takes the place of a missing one, without a path of this machine."""
    return f"{name}: not in this folder; taken from the installed jaxpar/{Path(name)}"
