"""Maps tensors of Hugging Face to parameters of a decoder: one table per family, used in both directions.

    ours                       dims     theirs                                    dims
    blocks/attention/query     d h k    model.layers.{}.self_attn.q_proj.weight   hk d

Letters are dims, and `hk` is h and k as one dim. {} is the number of the layer, and a second {} that of the expert. A
letter with + is the dim along which the parameters that share a tensor are concatenated.
    v vocab   s positions   d dim   h heads   g kv_heads   k head_dim   f hidden   e experts   m hidden of an expert

Both codes rotate pairs (i, i + n), so rotary weights need no permutation.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxpar.models.settings.decoder import DecoderConfig

EMBEDDING = """
embed                          v d     model.embed_tokens.weight                           v d
"""
HEAD = """
head                           d v     lm_head.weight                                      v d
"""
ENDS = (
    EMBEDDING
    + """
norm/scale                     d       model.norm.weight                                   d
"""
    + HEAD
)
ATTENTION = """
blocks/attention/query         d h k   model.layers.{}.self_attn.q_proj.weight             hk d
blocks/attention/query_bias    h k     model.layers.{}.self_attn.q_proj.bias               hk
blocks/attention/key           d g k   model.layers.{}.self_attn.k_proj.weight             gk d
blocks/attention/key_bias      g k     model.layers.{}.self_attn.k_proj.bias               gk
blocks/attention/value         d g k   model.layers.{}.self_attn.v_proj.weight             gk d
blocks/attention/value_bias    g k     model.layers.{}.self_attn.v_proj.bias               gk
blocks/attention/out           h k d   model.layers.{}.self_attn.o_proj.weight             d hk
blocks/attention/out_bias      d       model.layers.{}.self_attn.o_proj.bias               d
"""
PRE_NORMS = """
blocks/norm_attention/scale    d       model.layers.{}.input_layernorm.weight              d
blocks/norm_mlp/scale          d       model.layers.{}.post_attention_layernorm.weight     d
"""
POST_NORMS = """
blocks/post_norm_attention/scale  d    model.layers.{}.post_attention_layernorm.weight     d
blocks/post_norm_mlp/scale     d       model.layers.{}.post_feedforward_layernorm.weight   d
"""
BOTH_NORMS = """
blocks/norm_attention/scale    d       model.layers.{}.input_layernorm.weight              d
blocks/post_norm_attention/scale  d    model.layers.{}.post_attention_layernorm.weight     d
blocks/norm_mlp/scale          d       model.layers.{}.pre_feedforward_layernorm.weight    d
blocks/post_norm_mlp/scale     d       model.layers.{}.post_feedforward_layernorm.weight   d
"""
MLP = """
blocks/mlp/gate                d f     model.layers.{}.mlp.gate_proj.weight                f d
blocks/mlp/gate_bias           f       model.layers.{}.mlp.gate_proj.bias                  f
blocks/mlp/up                  d f     model.layers.{}.mlp.up_proj.weight                  f d
blocks/mlp/up_bias             f       model.layers.{}.mlp.up_proj.bias                    f
blocks/mlp/down                f d     model.layers.{}.mlp.down_proj.weight                d f
blocks/mlp/down_bias           d       model.layers.{}.mlp.down_proj.bias                  d
"""
HEAD_NORMS = """
blocks/attention/norm_query/scale  k   model.layers.{}.self_attn.q_norm.weight             k
blocks/attention/norm_key/scale    k   model.layers.{}.self_attn.k_norm.weight             k
"""
ALL_HEAD_NORMS = """
blocks/attention/norm_query/scale  h k  model.layers.{}.self_attn.q_norm.weight             hk
blocks/attention/norm_key/scale    g k  model.layers.{}.self_attn.k_norm.weight             gk
"""
PHI3 = """
blocks/attention/query         d h k   model.layers.{}.self_attn.qkv_proj.weight           h+k d
blocks/attention/key           d g k   model.layers.{}.self_attn.qkv_proj.weight           g+k d
blocks/attention/value         d g k   model.layers.{}.self_attn.qkv_proj.weight           g+k d
blocks/attention/out           h k d   model.layers.{}.self_attn.o_proj.weight             d hk
blocks/mlp/gate                d f     model.layers.{}.mlp.gate_up_proj.weight             f+ d
blocks/mlp/up                  d f     model.layers.{}.mlp.gate_up_proj.weight             f+ d
blocks/mlp/down                f d     model.layers.{}.mlp.down_proj.weight                d f
"""
PHI = """
head_bias                      v       lm_head.bias                                        v
norm/scale                     d       model.final_layernorm.weight                        d
norm/bias                      d       model.final_layernorm.bias                          d
blocks/norm_attention/scale    d       model.layers.{}.input_layernorm.weight              d
blocks/norm_attention/bias     d       model.layers.{}.input_layernorm.bias                d
blocks/mlp/up                  d f     model.layers.{}.mlp.fc1.weight                      f d
blocks/mlp/up_bias             f       model.layers.{}.mlp.fc1.bias                        f
blocks/mlp/down                f d     model.layers.{}.mlp.fc2.weight                      d f
blocks/mlp/down_bias           d       model.layers.{}.mlp.fc2.bias                        d
"""
STARCODER2 = """
norm/bias                      d       model.norm.bias                                     d
blocks/norm_attention/bias     d       model.layers.{}.input_layernorm.bias                d
blocks/norm_mlp/bias           d       model.layers.{}.post_attention_layernorm.bias       d
blocks/mlp/up                  d f     model.layers.{}.mlp.c_fc.weight                     f d
blocks/mlp/up_bias             f       model.layers.{}.mlp.c_fc.bias                       f
blocks/mlp/down                f d     model.layers.{}.mlp.c_proj.weight                   d f
blocks/mlp/down_bias           d       model.layers.{}.mlp.c_proj.bias                     d
"""
GPT2 = """
embed                          v d     transformer.wte.weight                              v d
positions                      s d     transformer.wpe.weight                              s d
norm/scale                     d       transformer.ln_f.weight                             d
norm/bias                      d       transformer.ln_f.bias                               d
head                           d v     lm_head.weight                                      v d
blocks/norm_attention/scale    d       transformer.h.{}.ln_1.weight                        d
blocks/norm_attention/bias     d       transformer.h.{}.ln_1.bias                          d
blocks/attention/query         d h k   transformer.h.{}.attn.c_attn.weight                 d h+k
blocks/attention/key           d g k   transformer.h.{}.attn.c_attn.weight                 d g+k
blocks/attention/value         d g k   transformer.h.{}.attn.c_attn.weight                 d g+k
blocks/attention/query_bias    h k     transformer.h.{}.attn.c_attn.bias                   h+k
blocks/attention/key_bias      g k     transformer.h.{}.attn.c_attn.bias                   g+k
blocks/attention/value_bias    g k     transformer.h.{}.attn.c_attn.bias                   g+k
blocks/attention/out           h k d   transformer.h.{}.attn.c_proj.weight                 hk d
blocks/attention/out_bias      d       transformer.h.{}.attn.c_proj.bias                   d
blocks/norm_mlp/scale          d       transformer.h.{}.ln_2.weight                        d
blocks/norm_mlp/bias           d       transformer.h.{}.ln_2.bias                          d
blocks/mlp/up                  d f     transformer.h.{}.mlp.c_fc.weight                    d f
blocks/mlp/up_bias             f       transformer.h.{}.mlp.c_fc.bias                      f
blocks/mlp/down                f d     transformer.h.{}.mlp.c_proj.weight                  f d
blocks/mlp/down_bias           d       transformer.h.{}.mlp.c_proj.bias                    d
"""
GPT_NEOX = """
embed                          v d     gpt_neox.embed_in.weight                            v d
norm/scale                     d       gpt_neox.final_layer_norm.weight                    d
norm/bias                      d       gpt_neox.final_layer_norm.bias                      d
head                           d v     embed_out.weight                                    v d
blocks/norm_attention/scale    d       gpt_neox.layers.{}.input_layernorm.weight           d
blocks/norm_attention/bias     d       gpt_neox.layers.{}.input_layernorm.bias             d
blocks/attention/query         d h k   gpt_neox.layers.{}.attention.query_key_value.weight  hk+ d
blocks/attention/key           d h k   gpt_neox.layers.{}.attention.query_key_value.weight  hk+ d
blocks/attention/value         d h k   gpt_neox.layers.{}.attention.query_key_value.weight  hk+ d
blocks/attention/query_bias    h k     gpt_neox.layers.{}.attention.query_key_value.bias   hk+
blocks/attention/key_bias      h k     gpt_neox.layers.{}.attention.query_key_value.bias   hk+
blocks/attention/value_bias    h k     gpt_neox.layers.{}.attention.query_key_value.bias   hk+
blocks/attention/out           h k d   gpt_neox.layers.{}.attention.dense.weight           d hk
blocks/attention/out_bias      d       gpt_neox.layers.{}.attention.dense.bias             d
blocks/norm_mlp/scale          d       gpt_neox.layers.{}.post_attention_layernorm.weight  d
blocks/norm_mlp/bias           d       gpt_neox.layers.{}.post_attention_layernorm.bias    d
blocks/mlp/up                  d f     gpt_neox.layers.{}.mlp.dense_h_to_4h.weight         f d
blocks/mlp/up_bias             f       gpt_neox.layers.{}.mlp.dense_h_to_4h.bias           f
blocks/mlp/down                f d     gpt_neox.layers.{}.mlp.dense_4h_to_h.weight         d f
blocks/mlp/down_bias           d       gpt_neox.layers.{}.mlp.dense_4h_to_h.bias           d
"""
MIXTRAL = """
blocks/mlp/router              d e     model.layers.{}.block_sparse_moe.gate.weight        e d
blocks/mlp/gate                e d m   model.layers.{}.block_sparse_moe.experts.{}.w1.weight  m d
blocks/mlp/up                  e d m   model.layers.{}.block_sparse_moe.experts.{}.w3.weight  m d
blocks/mlp/down                e m d   model.layers.{}.block_sparse_moe.experts.{}.w2.weight  d m
"""
EXPERTS = """
blocks/mlp/router              d e     model.layers.{}.mlp.gate.weight                     e d
blocks/mlp/gate                e d m   model.layers.{}.mlp.experts.{}.gate_proj.weight     m d
blocks/mlp/up                  e d m   model.layers.{}.mlp.experts.{}.up_proj.weight       m d
blocks/mlp/down                e m d   model.layers.{}.mlp.experts.{}.down_proj.weight     d m
"""
LLAMA = ENDS + PRE_NORMS + ATTENTION + MLP
TABLES = {
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "smollm3": LLAMA, "granite": LLAMA, "gemma": LLAMA,
    "gpt2": GPT2,
    "olmo": EMBEDDING + HEAD + ATTENTION + MLP,
    "qwen3": LLAMA + HEAD_NORMS,
    "phi": EMBEDDING + HEAD + ATTENTION.replace("o_proj", "dense") + PHI,
    "phi3": ENDS + PRE_NORMS + PHI3,
    "olmo2": ENDS + POST_NORMS + ATTENTION + ALL_HEAD_NORMS + MLP,
    "gemma2": ENDS + BOTH_NORMS + ATTENTION + MLP,
    "gemma3_text": ENDS + BOTH_NORMS + ATTENTION + HEAD_NORMS + MLP,
    "gpt_neox": GPT_NEOX,
    "starcoder2": ENDS + PRE_NORMS + ATTENTION + STARCODER2,
    "mixtral": ENDS + PRE_NORMS + ATTENTION + MIXTRAL,
    "qwen3_moe": ENDS + PRE_NORMS + ATTENTION + HEAD_NORMS + EXPERTS,
    "olmoe": ENDS + PRE_NORMS + ATTENTION + ALL_HEAD_NORMS + EXPERTS,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """One parameter, and the Hugging Face tensors that store it.

    Attributes:
      path: Path of the parameter.
      dims: Its dims in one tensor, by letter.
      tensor_name: Name of the tensor, `{}` for the layer, and a second one for the expert.
      tensor_dims: The tensor's dims, each of one or more letters.
      part: The range of the concatenated dim that stores this parameter.
      joint: The letter of the concatenated dim; "" if the tensor stores this parameter alone.
      stacked: Sizes of the parameter's leading dims, of which each entry has its own tensor: layers, experts.
      sizes: Letter to size.
      padding: Zeros after the vocabulary in the parameter, which no tensor has.
    """

    path: str
    dims: str
    tensor_name: str
    tensor_dims: tuple[str, ...]
    part: slice
    joint: str
    stacked: tuple[int, ...]
    sizes: Mapping[str, int] = field(repr=False)
    padding: int = 0

    @property
    def padded_dim(self) -> int:
        """The dim of the parameter in one tensor that has the padding."""
        return self.dims.index("v")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, stacked dims first."""
        sizes = (self.sizes[letter] + self.padding * (letter == "v") for letter in self.dims)
        return (*self.stacked, *sizes)

    @property
    def joint_dim(self) -> int:
        """The position of the concatenated dim among single letters; 0 without one."""
        return max(0, "".join(self.tensor_dims).find(self.joint)) if self.joint else 0

    def to_param(self, tensor: np.ndarray, total: int) -> np.ndarray:
        """Returns the parameter of one tensor as a view; `total` is the size of the tensor's concatenated dim."""
        letters = "".join(self.tensor_dims)
        view = tensor.reshape([total if letter == self.joint else self.sizes[letter] for letter in letters])
        if self.joint:
            view = view[(slice(None),) * self.joint_dim + (self.part,)]
        return view.transpose([letters.index(letter) for letter in self.dims])

    def to_tensor(self, value: np.ndarray) -> np.ndarray:
        """Transposes the parameter of one tensor to the tensor's order, one dim per letter; cuts the padding off."""
        if self.padding:
            value = value[(slice(None),) * self.padded_dim + (slice(self.sizes["v"]),)]
        return value.transpose([self.dims.index(letter) for letter in "".join(self.tensor_dims)])


def param_mappings(kind: str, settings: DecoderConfig) -> list[ParamMapping]:
    """One rule per parameter of a decoder."""
    s, e = settings, settings.experts
    sizes = {
        "v": s.vocab, "s": s.seq, "d": s.dim, "h": s.heads, "g": s.kv_heads or s.heads, "k": s.head_width, "f": s.width,
        "e": e.count, "m": e.hidden or s.width,
    }  # fmt: skip
    result, ends = [], {}
    for line in TABLES[kind].strip().splitlines():
        if not line.strip():
            continue
        ours, dims, theirs, flat = (cell.split() for cell in re.split(r" {2,}", line.strip()))
        path, name, places = ours[0], theirs[0], theirs[0].count("{}")
        if not _exists(path, settings):
            continue
        joint = next((word[word.index("+") - 1] for word in flat if "+" in word), "")
        start = ends.get(name, 0)
        ends[name] = start + (sizes[joint] if joint else 0)
        letters = "".join(dims)
        result.append(
            ParamMapping(
                path=path, dims=letters[1:] if places == 2 else letters, tensor_name=name,
                tensor_dims=tuple(word.replace("+", "") for word in flat), part=slice(start, ends[name]), joint=joint,
                stacked=(s.layers, e.count)[:places], sizes=sizes,
                padding=s.vocab_rows - s.vocab if "v" in letters else 0,
            )
        )  # fmt: skip
    return result


def _exists(path: str, settings: DecoderConfig) -> bool:
    """Whether a decoder of these settings has a parameter."""
    if path == "head":
        return not settings.tied
    if path == "head_bias":
        return settings.head_bias
    if not path.endswith("_bias"):
        return True
    part = "mlp" if "/mlp/" in path else "out" if path.endswith("out_bias") else "qkv"
    return part in settings.biased_parts and (settings.gated or not path.endswith("gate_bias"))


def joint_size(group: list[ParamMapping]) -> int:
    """Size of the dim along which these rules, which share a tensor, are concatenated."""
    return group[-1].part.stop


def tensor_shape(group: list[ParamMapping]) -> tuple[int, ...]:
    """Shape of the tensor that these rules share."""
    last, total = group[-1], joint_size(group)
    return tuple(
        math.prod(total if letter == last.joint else last.sizes[letter] for letter in letters)
        for letters in last.tensor_dims
    )


def to_tensor(group: list[ParamMapping], values: list[np.ndarray]) -> np.ndarray:
    """Returns the tensor that these rules share, of their parameters in it."""
    parts = [rule.to_tensor(value) for rule, value in zip(group, values, strict=True)]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=group[0].joint_dim)
    return joined.reshape(tensor_shape(group))


def groups(table: list[ParamMapping]) -> dict[str, list[ParamMapping]]:
    """Returns the rules by the name of their tensor."""
    result: dict[str, list[ParamMapping]] = {}
    for rule in table:
        result.setdefault(rule.tensor_name, []).append(rule)
    return result
