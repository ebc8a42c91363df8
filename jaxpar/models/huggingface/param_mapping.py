"""Maps tensors of Hugging Face to parameters of a decoder: one table per kind of model, used in both directions.

    ours                       dims     theirs                                    dims
    blocks/attention/query     d h k    model.layers.{}.self_attn.q_proj.weight   hk d

Letters are dims, and `hk` is h and k as one dim. A tensor that several rules name concatenates their parameters. Both
codes rotate pairs (i, i + head_dim / 2), so rotary weights need no permutation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxpar.models.settings.decoder import DecoderConfig

# ours, its dims, theirs, its dims. d embed, s seq_table, v vocab, h heads, g kv_heads, k head_dim, f mlp; {} the layer
LLAMA = """
embed                          v d     model.embed_tokens.weight                           v d
norm/scale                     d       model.norm.weight                                   d
head                           d v     lm_head.weight                                      v d
blocks/norm_attention/scale    d       model.layers.{}.input_layernorm.weight              d
blocks/attention/query         d h k   model.layers.{}.self_attn.q_proj.weight             hk d
blocks/attention/query_bias    h k     model.layers.{}.self_attn.q_proj.bias               hk
blocks/attention/key           d g k   model.layers.{}.self_attn.k_proj.weight             gk d
blocks/attention/key_bias      g k     model.layers.{}.self_attn.k_proj.bias               gk
blocks/attention/value         d g k   model.layers.{}.self_attn.v_proj.weight             gk d
blocks/attention/value_bias    g k     model.layers.{}.self_attn.v_proj.bias               gk
blocks/attention/out           h k d   model.layers.{}.self_attn.o_proj.weight             d hk
blocks/attention/out_bias      d       model.layers.{}.self_attn.o_proj.bias               d
blocks/norm_mlp/scale          d       model.layers.{}.post_attention_layernorm.weight     d
blocks/mlp/gate                d f     model.layers.{}.mlp.gate_proj.weight                f d
blocks/mlp/gate_bias           f       model.layers.{}.mlp.gate_proj.bias                  f
blocks/mlp/up                  d f     model.layers.{}.mlp.up_proj.weight                  f d
blocks/mlp/up_bias             f       model.layers.{}.mlp.up_proj.bias                    f
blocks/mlp/down                f d     model.layers.{}.mlp.down_proj.weight                d f
blocks/mlp/down_bias           d       model.layers.{}.mlp.down_proj.bias                  d
"""
GPT2 = """
embed                          v d     transformer.wte.weight                              v d
positions                      s d     transformer.wpe.weight                              s d
norm/scale                     d       transformer.ln_f.weight                             d
norm/bias                      d       transformer.ln_f.bias                               d
head                           d v     lm_head.weight                                      v d
blocks/norm_attention/scale    d       transformer.h.{}.ln_1.weight                        d
blocks/norm_attention/bias     d       transformer.h.{}.ln_1.bias                          d
blocks/attention/query         d h k   transformer.h.{}.attn.c_attn.weight                 d hk
blocks/attention/key           d g k   transformer.h.{}.attn.c_attn.weight                 d gk
blocks/attention/value         d g k   transformer.h.{}.attn.c_attn.weight                 d gk
blocks/attention/query_bias    h k     transformer.h.{}.attn.c_attn.bias                   hk
blocks/attention/key_bias      g k     transformer.h.{}.attn.c_attn.bias                   gk
blocks/attention/value_bias    g k     transformer.h.{}.attn.c_attn.bias                   gk
blocks/attention/out           h k d   transformer.h.{}.attn.c_proj.weight                 hk d
blocks/attention/out_bias      d       transformer.h.{}.attn.c_proj.bias                   d
blocks/norm_mlp/scale          d       transformer.h.{}.ln_2.weight                        d
blocks/norm_mlp/bias           d       transformer.h.{}.ln_2.bias                          d
blocks/mlp/up                  d f     transformer.h.{}.mlp.c_fc.weight                    d f
blocks/mlp/up_bias             f       transformer.h.{}.mlp.c_fc.bias                      f
blocks/mlp/down                f d     transformer.h.{}.mlp.c_proj.weight                  f d
blocks/mlp/down_bias           d       transformer.h.{}.mlp.c_proj.bias                    d
"""
TABLES = {"llama": LLAMA, "gpt2": GPT2}


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """One parameter, and the Hugging Face tensor that stores it.

    Attributes:
      path: Path of the parameter.
      dims: Its dims in one layer, by letter.
      tensor_name: Name of the tensor, `{}` for the layer.
      tensor_dims: The tensor's dims, each of one or more letters.
      columns: The range of the tensor's last dim that stores this parameter.
      sizes: Letter to size.
    """

    path: str
    dims: str
    tensor_name: str
    tensor_dims: tuple[str, ...]
    columns: slice
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def stacked(self) -> bool:
        """Whether each layer has its own tensor."""
        return "{}" in self.tensor_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in one layer."""
        return tuple(self.sizes[letter] for letter in self.dims)

    def to_param(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter as a view of a tensor."""
        letters = "".join(self.tensor_dims)
        unflattened = tensor[..., self.columns].reshape([self.sizes[letter] for letter in letters])
        return unflattened.transpose([letters.index(letter) for letter in self.dims])

    def to_tensor(self, value: np.ndarray) -> np.ndarray:
        """Reshapes the parameter to its columns of the tensor."""
        transposed = value.transpose([self.dims.index(letter) for letter in "".join(self.tensor_dims)])
        return transposed.reshape([_product(self.sizes, letters) for letters in self.tensor_dims])


def param_mappings(kind: str, settings: DecoderConfig) -> list[ParamMapping]:
    """One rule per parameter of a decoder."""
    s = settings
    kv, head_dim = s.kv_heads or s.heads, s.dim // s.heads
    sizes = {"v": s.vocab, "s": s.seq, "d": s.dim, "h": s.heads, "g": kv, "k": head_dim, "f": s.width}
    result, ends = [], {}
    for line in TABLES[kind].strip().splitlines():
        ours, dims, theirs, flat = (cell.split() for cell in line.replace("  ", "\t").split("\t") if cell.strip())
        if (ours == ["head"] and s.tied) or (ours[0].endswith("_bias") and not s.use_bias):
            continue
        start = ends.get(theirs[0], 0)
        ends[theirs[0]] = start + _product(sizes, flat[-1])
        result.append(
            ParamMapping(
                path=ours[0], dims="".join(dims), tensor_name=theirs[0], tensor_dims=tuple(flat),
                columns=slice(start, ends[theirs[0]]), sizes=sizes,
            )
        )  # fmt: skip
    return result


def tensor_shape(group: list[ParamMapping]) -> tuple[int, ...]:
    """Shape of the tensor that these rules share."""
    last = group[-1]
    return (*(_product(last.sizes, letters) for letters in last.tensor_dims[:-1]), last.columns.stop)


def _product(sizes: Mapping[str, int], letters: str) -> int:
    return math.prod(sizes[letter] for letter in letters)
