"""Opens the data of `jp.fit`, describes its held-out examples, and refuses a folder that belongs to other data."""

import json
from pathlib import Path
from typing import Any

from jaxpar.data.spec import Data, Source
from jaxpar.data.streams.user_data import open_user_data
from jaxpar.data.text import Examples
from jaxpar.errors import file_errors, refuse


def open_fit_data(data: Any, folder: Path | None, held_out: float | None) -> Source:
    """Opens the argument `data` of `jp.fit`.

    Args:
      data: The result of `jp.open_data`, or the user's object.
      folder: The run folder, or None.
      held_out: Share of the examples that is held out; None is `Data.held_out` where a share can be held out.

    Raises:
      JaxparError: If `data` is no source, or `held_out` is given for data of which it cannot hold out a share.
    """
    if isinstance(data, Data):
        raise refuse(f"data={data!r:.60}", rule="data is opened before it is read", fix="jp.open_data(data)")
    if type(data).__module__.startswith("jaxpar.data."):
        if held_out is not None:
            rule = "data that is open has its share held out already"
            raise refuse(f"held_out={held_out!r:.60}, and data of jp.open_data", rule=rule,
                         fix=f"jp.open_data(jp.Data(..., held_out={held_out!r:.60}))")  # fmt: skip
        return data
    spec = Data(source="yours:data", held_out=Data.held_out if held_out is None else held_out)
    source = open_user_data(spec, data, (folder or Path("runs")) / "data")
    if held_out is not None and not isinstance(source, Examples):
        rule = "a share is held out of a dict of arrays, or of a dataset without an evaluation of its own"
        raise refuse(f"held_out={held_out!r:.60}, and data is a {type(data).__name__}", rule=rule,
                     fix='leave it out; sets={"name": examples} evaluates others')  # fmt: skip
    return source


def count_held_out(source: Source) -> int | None:
    """Returns the number of held-out examples; None if the user's own source does not define it."""
    return getattr(source, "held_out_count", None)


def describe_split(source: Source) -> str:
    """Describes how many examples are held out; "" if the source does not know."""
    count = count_held_out(source)
    if count is None:
        return ""
    share = f" (held_out={source.spec.held_out:g})" if isinstance(source, Examples) else ""
    return f"data: {source.examples:,} examples to train on, {count:,} held out for evaluation{share}"


def check_same_data(folder: Path, source: Source) -> None:
    """Checks that a run that is resumed has the data of its run.json, with the same examples held out.

    Raises:
      JaxparError: If the data differs, examples that were held out would be trained on, or the file is damaged.
    """
    file = folder / "run.json"
    if not file.exists():
        return
    with file_errors(file, rule="run.json records the data of a run", fix=f"rm {file}, if the data is the same"):
        facts = json.loads(file.read_text())
        before, split = facts["data"], facts.get("held_out")
    if before != source.fingerprint:
        raise refuse(
            f"{folder} was trained on data {before}, now it is {source.fingerprint}",
            rule="a run goes on with the data it began with",
            fix="another run=, or the data it began with",
        )
    count = count_held_out(source)
    if split is not None and split != count:
        raise refuse(
            f"{folder} held out {split} examples, now {count} are",
            rule="a resumed run holds out the same examples, so that none of them was trained on",
            fix="another run=, or the same held_out as at its start",
        )
