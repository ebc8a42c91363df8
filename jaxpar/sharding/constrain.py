"""Maps the names that a model gives to dims of activations to mesh axes, while a step is traced.

A model calls Flax's own `nn.with_logical_constraint(x, ("batch", "seq", "embed"))`, or `jaxpar.constrain(x, "batch",
"seq", "embed")`, and knows no mesh; outside of a step both do nothing. If a name has no rule, XLA chooses the sharding
of its dim from the operands of the activation.

Dim names of other code bases map to jaxpar's names for the same dims. A dim with such a name is split like one with
jaxpar's name, also if a user's rule is for jaxpar's name; a rule for the foreign name itself takes precedence. A name
is listed only if jaxpar has one with the same meaning. Any other name has no rule: the dim of a parameter stays
unsharded, and XLA decides about the dim of an activation. To add one: a row under its code base.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flax.core import spmd
from jax.sharding import PartitionSpec

from jaxpar.models.dim_names import step_rules
from jaxpar.sharding.rules import Axes

# MaxText       src/maxtext/configs/base.yml and common_types.py, github.com/AI-Hypercomputer/maxtext
# T5X           t5x/partitioning.py, `standard_logical_axis_rules`, github.com/google-research/t5x
# big_vision    big_vision/models/vit.py and models/ppp/gemma.py, github.com/google-research/big_vision
# maxdiffusion  src/maxdiffusion/common_types.py and configs/*.yml, github.com/AI-Hypercomputer/maxdiffusion
# haliax        axis names of Levanter, src/levanter/models, github.com/stanford-crfm/levanter
MEANINGS: dict[str, str] = {
    # MaxText; maxdiffusion has those that do not end with a part of the model
    "activation_batch": "batch",
    "activation_batch_attn": "batch",
    "activation_batch_moe": "batch",
    "activation_embed_and_logits_batch": "batch",
    "activation_kv_batch": "batch",
    "activation_length": "seq",
    "activation_length_attn": "seq",
    "activation_input_length_attn": "seq",
    "activation_length_moe": "seq",
    "activation_norm_length": "seq",
    "activation_norm_length_moe": "seq",
    "activation_q_length": "seq",
    "activation_kv_length": "keys",
    "activation_heads": "heads",
    "activation_kv_heads": "kv_heads",
    "activation_kv": "head_dim",
    "activation_kv_head_dim": "head_dim",
    "activation_mlp": "mlp",
    "activation_mlp_moe": "mlp",
    "activation_embed": "embed",
    "activation_embed_attn": "embed",
    "activation_embed_moe": "embed",
    "activation_vocab": "vocab",
    "activation_exp": "expert",
    "exp": "expert",
    "q_heads": "heads",
    "kv_head_dim": "head_dim",
    "mlp_moe": "mlp",
    "mlp_no_fsdp": "mlp",
    "embed_moe": "embed",
    "embed_vocab": "embed",
    # T5X
    "length": "seq",
    "kv": "head_dim",
    "joined_kv": "heads",  # heads and head_dim as one dim, the heads outermost
    # big_vision; its act_emb is the stream, but also the output of an mlp's first matrix
    "act_batch": "batch",
    "act_len": "seq",
    # maxdiffusion
    "conv_batch": "batch",
    "activation_self_attn_heads": "heads",
    "activation_self_attn_q_length": "seq",
    "activation_self_attn_kv_length": "keys",
    "activation_cross_attn_heads": "heads",
    "activation_cross_attn_q_length": "seq",
    "activation_cross_attn_kv_length": "keys",
    "out_channels": "hidden",  # of a convolution's activation
    # haliax
    "position": "seq",
    "key_position": "keys",
    "kv_head": "kv_heads",
    "head_size": "head_dim",
}


def with_vocabularies(names: Mapping[str, Axes]) -> dict[str, Axes]:
    """Adds to the rules, after each name of a dim, the names of that dim in other code bases, with the same axes."""
    extended: dict[str, Axes] = {}
    for name, axes in names.items():
        extended[name] = axes
        extended |= {foreign: axes for foreign, meaning in MEANINGS.items() if meaning == name and foreign not in names}
    return extended


def with_meanings(names: set[str]) -> set[str]:
    """Adds, for each name that comes from another code base, jaxpar's name of the same dim."""
    return names | {MEANINGS[name] for name in names if name in MEANINGS}


class _NameRecorder:
    """Replaces the name in the first rule: it equals nothing, and records each name that it is compared with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            self.names.append(str(other))
        return False

    __hash__ = object.__hash__


class RecordingRules(tuple):
    """Flax rules, as (name, axes), followed by an UNCONSTRAINED rule for every other name of the current activation.

    Flax replicates a dim whose name has no rule: a constraint on ("activation_batch", ...) would gather the batch. Flax
    has no hook to change this, but it compares the name of each rule, in order, with the names of the activation. So
    the name of the first rule is an object that records the activation's names during these comparisons, and the last
    rules leave the dims without a rule to XLA.

    Attributes:
      recorded_names: The names of all activations so far.
    """

    recorded_names: set[str]

    def __iter__(self) -> Iterator:
        recorder = _NameRecorder()
        yield recorder, None
        ruled = set()
        for name, axes in super().__iter__():
            ruled.add(name)
            yield name, axes
        self.recorded_names.update(recorder.names)
        yield from ((name, PartitionSpec.UNCONSTRAINED) for name in dict.fromkeys(recorder.names) if name not in ruled)


@contextmanager
def activation_names(names: Mapping[str, Axes], sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Context in which these rules map names of activation dims to mesh axes; earlier rules take precedence.

    If another dim of the activation already uses one of several axes of a name, the name gets only its first axis.

    Yields:
      The set of names that the model used, also in nested contexts; it is complete when the context ends.
    """

    def active_axes(axes: Axes) -> Axes:
        active = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if sizes.get(axis, 1) > 1)
        return None if not active else active[0] if len(active) == 1 else active

    rules = []
    for name, axes in names.items():
        active = active_axes(axes)
        rules.append((name, active))
        if isinstance(active, tuple):
            # Flax skips a rule if one of its axes is taken. So each rule is repeated with only its first axis:
            # under sequence parallelism `seq` is (context, tensor) on the stream, and context where heads have tensor
            rules.append((name, active[0]))
    # a pipeline nests this context inside of the step's, with other sizes: names used there also count for the step
    outer_rules = step_rules.get()
    resolved = RecordingRules(rules)
    resolved.recorded_names = outer_rules.recorded_names if isinstance(outer_rules, RecordingRules) else set()
    token = step_rules.set(resolved)
    try:
        with spmd.logical_axis_rules(resolved):
            yield resolved.recorded_names
    finally:
        step_rules.reset(token)
