"""Tensors of Hugging Face's families, as rows: our parameter, its dims, their tensor, its dims.

Letters are dims, and `hk` is h and k as one dim. {} is the number of the layer, and a second {} that of the expert. A
letter with + is the dim along which the parameters that share a tensor are concatenated.
    v vocab   s positions   d dim   h heads   g kv_heads   k head_dim   f hidden   e experts   m hidden of an expert
"""

ENDS = """
embed                          v d     model.embed_tokens.weight                           v d
norm/scale                     d       model.norm.weight                                   d
head                           d v     lm_head.weight                                      v d
"""
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
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "smollm3": LLAMA, "granite": LLAMA, "gpt2": GPT2,
    "qwen3": LLAMA + HEAD_NORMS,
    "phi3": ENDS + PRE_NORMS + PHI3,
    "olmo2": ENDS + POST_NORMS + ATTENTION + ALL_HEAD_NORMS + MLP,
    "gemma2": ENDS + BOTH_NORMS + ATTENTION + MLP,
    "gemma3_text": ENDS + BOTH_NORMS + ATTENTION + HEAD_NORMS + MLP,
    "gpt_neox": GPT_NEOX,
    "mixtral": ENDS + PRE_NORMS + ATTENTION + MIXTRAL,
    "qwen3_moe": ENDS + PRE_NORMS + ATTENTION + HEAD_NORMS + EXPERTS,
    "olmoe": ENDS + PRE_NORMS + ATTENTION + ALL_HEAD_NORMS + EXPERTS,
}  # fmt: skip
