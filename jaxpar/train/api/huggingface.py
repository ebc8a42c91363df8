"""`jp.from_huggingface` and `jp.to_huggingface`: weights of a Hugging Face folder in a Flax model of your own.

    folder ─► rules ─► {path: tensor in a file} ─► jp.init_state(..., params=...) ─► each device reads its own shard
    folder ◄─ rules ◄─ the parameters that jp.model returns ◄─ state after training

Rules: `models/huggingface/param_rules.py`. jaxpar's own `Decoder` has them: `models/huggingface/param_mapping.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxpar.errors import JaxparError, Problem, refuse, shape_differences
from jaxpar.models.huggingface.folder import CONFIG, is_folder, read_config
from jaxpar.models.huggingface.param_mapping import ParamMapping, groups, joint_size
from jaxpar.models.huggingface.param_rules import Rule, expand, tensor_shapes
from jaxpar.models.huggingface.safetensors import FLOATS, NAMES, Entry, folder_entries
from jaxpar.models.huggingface.weights import Tensor, find_entries, float_dtype, shorten, tensor_sources, write_model
from jaxpar.optim.patterns import has_prefix
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import ROOM as ADAPTERS
from jaxpar.sharding.adapters import checkpoint_leaves, without_adapters
from jaxpar.sharding.names import Blueprint, leaves_by_path
from jaxpar.step.checks.input_state import check_matches_layout, check_not_donated
from jaxpar.step.model import eval_model
from jaxpar.step.state import State

MAX_FILE_BYTES = 5 * 10**9


def from_huggingface(
    folder: str | Path, model: Callable | Blueprint | Layout, rules: Mapping[str, Rule], *, skip: Sequence[str] = ()
) -> dict[str, Tensor | None]:
    """Maps the tensors of a Hugging Face folder to the parameters of a Flax model; no weight is read yet.

        rules = {
            "embed/embedding": ("model.embed_tokens.weight", "vocab embed -> vocab embed"),
            "layers/{}/norm/scale": "model.layers.{}.input_layernorm.weight",
            "layers/{}/query": ("model.layers.{}.self_attn.q_proj.weight", "(heads dim) embed -> embed heads dim"),
            "classifier/*": None,
        }
        weights = jp.from_huggingface("my-bert", model, rules)
        state = jp.init_state(layout, optimizer, params=weights)

    A `{}` in a path is a number, and fills the first `{}` of the tensor's name. Further ones in the name count the
    leading dims of a parameter that stacks several tensors (layers, experts). Dims are the tensor's, then the
    parameter's, as in einops; a vector needs none. `(heads+ dim)` marks the dim along which the parameters that share a
    tensor are concatenated, in the order of their rules.

    Args:
      folder: Folder with model.safetensors, or with an index and its files.
      model: The model, as for `jp.compose`; or its layout, which saves tracing it again.
      rules: Path of a parameter to (name of the tensor, dims), to the name alone, or to None if it is to be
        initialized; a path with the rule None may have `*`.
      skip: Names of tensors that the model does not use; may have `*`.

    Returns:
      Path to tensor: indexing it reads that part of the files, in the dtype of the parameter. None for a parameter that
      is to be initialized.

    Raises:
      JaxparError: If a parameter has no rule, a tensor is not read, shapes differ, tensors hold no floats, or a file is
        damaged; the message lists all such parameters and tensors.
    """
    blueprint = model.blueprint if isinstance(model, Layout) else as_blueprint(model)
    leaves = checkpoint_leaves(blueprint)
    if blueprint.adapters:  # they are always initialized
        leaves = {path: leaf for path, leaf in leaves.items() if not has_prefix(path, ADAPTERS)}
    mappings, problems = expand(_check_rules(rules), leaves)
    tensors = folder_entries(Path(folder).expanduser())
    used = {name: entry for name, entry in tensors.items() if not any(fnmatchcase(name, text) for text in skip)}
    table = [mapping for mapping in mappings.values() if mapping is not None]
    problems += [
        Problem(
            f"skip: {text!r} matches no tensor", "each pattern of skip matches a tensor of the folder", "leave it out"
        )
        for text in skip
        if not any(fnmatchcase(name, text) for name in tensors)
    ]
    if problems := [*problems, *_tensor_problems(used, table, complete=not problems)]:
        raise JaxparError(*problems)
    totals = {name: joint_size(group) for name, group in groups(table).items()}
    return {
        path: rule and Tensor(rule, find_entries(rule, used), totals[rule.tensor_name], np.dtype(leaves[path].dtype))
        for path, rule in mappings.items()
    }


def to_huggingface(
    folder: str | Path,
    layout: Layout,
    state: State,
    rules: Mapping[str, Rule],
    *,
    origin: str | Path,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Writes a trained model as the Hugging Face folder that it was read from, one tensor at a time.

    The parameters are those that `jp.model` returns: averages, and adapters merged. Unchanged weights are written bit
    for bit. Parameters whose rule is None, and skipped tensors, are not written.

    Args:
      folder: Output folder; must contain no model.
      layout: The layout of the state.
      state: A state as a step returns it.
      rules: The rules of `jp.from_huggingface`.
      origin: The folder that the model was read from; its config.json, tokenizer and generation config are copied.
      dtype: Dtype of the written tensors: float32, bfloat16 or float16; by default that of the parameters.
      max_file_bytes: Maximum bytes per file; a larger model is written as several files with an index.

    Returns:
      The written files.

    Raises:
      JaxparError: If the rules do not fit the model, the state is of another layout, there are several processes, or
        files cannot be written.
    """
    _check_export(layout, state, origin)
    leaves = without_adapters(layout.blueprint).leaves
    params = leaves_by_path(eval_model(layout, state)[0])
    table = _table(rules, leaves)
    return _write(folder, params, table, origin=origin, dtype=dtype, max_file_bytes=max_file_bytes)


def write_by_rules(
    folder: str | Path, params: Mapping[str, object], rules: Mapping[str, Rule], *, origin: str | Path
) -> list[Path]:
    """Writes parameters by path, without adapters, as `to_huggingface` does; returns the written files.

    Raises:
      JaxparError: If the rules do not fit the parameters, or files cannot be written.
    """
    return _write(folder, params, _table(rules, params), origin=origin, dtype=None, max_file_bytes=MAX_FILE_BYTES)


def _table(rules: Mapping[str, Rule], leaves: Mapping[str, object]) -> list[ParamMapping]:
    mappings, problems = expand(_check_rules(rules), leaves)
    if problems:
        raise JaxparError(*problems)
    return [mapping for mapping in mappings.values() if mapping is not None]


def _write(
    folder: str | Path,
    params: Mapping[str, object],
    table: list[ParamMapping],
    *,
    origin: str | Path,
    dtype: DTypeLike | None,
    max_file_bytes: int,
) -> list[Path]:
    sources = tensor_sources(params, table, None if dtype is None else float_dtype(dtype))
    config = read_config(Path(origin).expanduser() / CONFIG)
    dtypes = {source.dtype.name for source in sources}
    if len(dtypes) == 1:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtypes.pop()
    return write_model(folder, sources, config, max_file_bytes=max_file_bytes, origin=Path(origin).expanduser())


def _check_rules(rules: object) -> Mapping[str, Rule]:
    if isinstance(rules, Mapping) and all(isinstance(path, str) for path in rules):
        return rules
    raise refuse(
        f"rules={rules!r:.100}",
        rule="rules map the path of each parameter to the name and the dims of a tensor",
        fix='{"up/kernel": ("model.up_proj.weight", "hidden embed -> embed hidden")}',
    )


def _check_export(layout: object, state: Any, origin: str | Path) -> None:
    if not isinstance(layout, Layout):
        raise refuse(f"layout={layout!r:.80}", rule="a layout is what jp.compose returns", fix="step.layout")
    if jax.process_count() > 1:
        raise refuse(
            f"jp.to_huggingface in {jax.process_count()} processes",
            rule="one process writes the folder, from arrays that it has",
            fix="jp.save(path, state), then in one process jp.restore(path, step) and jp.to_huggingface",
        )
    if not is_folder(origin):
        raise refuse(f"origin={str(origin)!r:.200}", rule="origin is a folder with config.json", fix="the folder read")
    check_not_donated(state)
    check_matches_layout(state, layout)


def _tensor_problems(tensors: Mapping[str, Entry], table: list[ParamMapping], *, complete: bool) -> list[Problem]:
    """Reports tensors that are missing, of another shape or dtype; and those not read, if all rules are whole."""
    expected = tensor_shapes(table)
    found = shape_differences(tensors, expected, owner="these rules")
    missing, unread = found.get("missing", []), found.get("not of these rules", [])
    shapes = found.get("of another shape", [])
    numbers = [
        f"{name} {NAMES[tensors[name].dtype]}"
        for name in expected
        if name in tensors and tensors[name].dtype not in FLOATS
    ]
    rows = [
        (missing, "that are not in the folder", "a rule names tensors of the folder", "other names, or None"),
        (unread if complete else [], "that no rule reads", "each tensor is read, or skipped",
         f"a rule for it, or skip=[{unread[0]!r}]" if unread else ""),
        (shapes, "of another shape than their rules give", "a tensor has the same dims as its parameter, in any order",
         "the model's own sizes, or other dims in the rule"),
        (numbers, "in numbers that are not read", "weights are read in F32, F16 or BF16", "skip=[...]"),
    ]  # fmt: skip
    return [Problem(f"tensors {what}: {shorten(names)}", rule, fix) for names, what, rule, fix in rows if names]
