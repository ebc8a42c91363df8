"""Maps dim names of other code bases to jaxpar's names for the same dims.

A dim with such a name is split like one with jaxpar's name, also if a user's rule is for jaxpar's name; a rule for the
foreign name itself takes precedence. A name is listed only if jaxpar has one with the same meaning. Any other name has
no rule: the dim of a parameter stays unsharded, and XLA decides about the dim of an activation.

To add one: a row under its code base.
"""

from collections.abc import Mapping

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
