"""The config.json of published models, as their folders have it, and their numbers of parameters.

Sources: the folders `config.json` and `model.safetensors.index.json` of these models on the Hugging Face Hub.
"""

COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
}  # fmt: skip


def config(kind, architecture, layers, dim, heads, hidden, vocab, seq, **keys):
    shape = {
        "num_hidden_layers": layers, "hidden_size": dim, "num_attention_heads": heads, "intermediate_size": hidden,
        "vocab_size": vocab, "max_position_embeddings": seq,
    }  # fmt: skip
    return COMMON | {"model_type": kind, "architectures": [architecture]} | shape | keys


SILU = {"hidden_act": "silu"}
NO_BIAS = {"attention_bias": False}
UNTIED = {"tie_word_embeddings": False}
LLAMA3 = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN2 = config(
    "qwen2", "Qwen2ForCausalLM", 28, 3584, 28, 18944, 152064, 131072, max_window_layers=28, num_key_value_heads=4,
    rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=131072, use_mrope=False, use_sliding_window=False, **SILU,
    **UNTIED,
)  # fmt: skip
GEMMA2 = config(
    "gemma2", "Gemma2ForCausalLM", 26, 2304, 8, 9216, 256000, 8192, attn_logit_softcapping=50.0,
    cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh", num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256,
    rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, **NO_BIAS,
)  # fmt: skip
GEMMA3 = config(
    "gemma3_text", "Gemma3ForCausalLM", 26, 1152, 4, 6912, 262144, 32768, attn_logit_softcapping=None,
    cache_implementation="hybrid", final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
    num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000, rope_scaling=None,
    rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, **NO_BIAS,
) | {"eos_token_id": [1, 106]}  # fmt: skip
PUBLISHED = {
    "Llama-3.2-1B": (
        config("llama", "LlamaForCausalLM", 16, 2048, 32, 8192, 128256, 131072, head_dim=64, mlp_bias=False,
               num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=LLAMA3, rope_theta=500000.0,
               tie_word_embeddings=True, **SILU, **NO_BIAS),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        config("mistral", "MistralForCausalLM", 32, 4096, 32, 14336, 32000, 32768, num_key_value_heads=8,
               rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, **SILU, **UNTIED),
        7_241_732_096,
    ),
    "Qwen2.5-7B": (QWEN2, 7_615_616_512),
    "Qwen3-8B": (
        config("qwen3", "Qwen3ForCausalLM", 36, 4096, 32, 12288, 151936, 40960, head_dim=128, max_window_layers=36,
               num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None,
               use_sliding_window=False, **SILU, **NO_BIAS, **UNTIED),
        8_190_735_360,
    ),
    "phi-2": (
        config("phi", "PhiForCausalLM", 32, 2560, 32, 10240, 51200, 2048, embd_pdrop=0.0, hidden_act="gelu_new",
               layer_norm_eps=1e-5, num_key_value_heads=32, partial_rotary_factor=0.4, qk_layernorm=False,
               resid_pdrop=0.1, rope_scaling=None, rope_theta=10000.0, **UNTIED),
        2_779_683_840,
    ),
    "Phi-3-mini-4k": (
        config("phi3", "Phi3ForCausalLM", 32, 3072, 32, 8192, 32064, 4096, auto_map={"AutoConfig": "x.Phi3Config"},
               embd_pdrop=0.0, num_key_value_heads=32, original_max_position_embeddings=4096, resid_pdrop=0.0,
               rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, sliding_window=2047, **SILU, **NO_BIAS,
               **UNTIED),
        3_821_079_552,
    ),
    "OLMo-1B": (
        config("olmo", "OlmoForCausalLM", 16, 2048, 16, 8192, 50304, 2048, clip_qkv=None, num_key_value_heads=16,
               rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=True, **SILU, **NO_BIAS),
        1_176_764_416,
    ),
    "OLMo-2-1124-7B": (
        config("olmo2", "Olmo2ForCausalLM", 32, 4096, 32, 11008, 100352, 4096, num_key_value_heads=32,
               rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, **SILU, **NO_BIAS, **UNTIED),
        7_298_617_344,
    ),
    "SmolLM3-3B": (
        config("smollm3", "SmolLM3ForCausalLM", 36, 2048, 16, 11008, 128256, 65536, layer_types=["full_attention"] * 36,
               max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
               num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=5000000.0,
               sliding_window=None, use_sliding_window=False, **SILU, **NO_BIAS),
        3_075_098_624,
    ),
    "granite-3.1-8b-base": (
        config("granite", "GraniteForCausalLM", 40, 4096, 32, 12800, 49155, 131072, attention_multiplier=0.0078125,
               embedding_multiplier=12.0, logits_scaling=16.0, mlp_bias=False, num_key_value_heads=8,
               residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000.0,
               tie_word_embeddings=True, **SILU, **NO_BIAS),
        8_170_848_256,
    ),
    "gemma-2b": (
        config("gemma", "GemmaForCausalLM", 18, 2048, 8, 16384, 256000, 8192, head_dim=256, hidden_act="gelu",
               hidden_activation=None, num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-6, rope_scaling=None,
               rope_theta=10000.0, **NO_BIAS),
        2_506_172_416,
    ),
    "gemma-2-2b": (GEMMA2, 2_614_341_888),
    "gemma-3-1b": (GEMMA3, 999_885_952),
    "pythia-1b": (
        config("gpt_neox", "GPTNeoXForCausalLM", 16, 2048, 8, 8192, 50304, 2048, hidden_act="gelu", layer_norm_eps=1e-5,
               rotary_emb_base=10000, rotary_pct=0.25, use_parallel_residual=True, **UNTIED),
        1_011_781_632,
    ),
    "gpt-neox-20b": (
        config("gpt_neox", "GPTNeoXForCausalLM", 44, 6144, 64, 24576, 50432, 2048, attention_probs_dropout_prob=0,
               hidden_act="gelu_fast", hidden_dropout_prob=0, layer_norm_eps=1e-5, rotary_emb_base=10000,
               rotary_pct=0.25, use_parallel_residual=True, **UNTIED),
        20_554_567_680,
    ),
    "starcoder2-3b": (
        config("starcoder2", "Starcoder2ForCausalLM", 30, 3072, 24, 12288, 49152, 16384, activation_function="gelu",
               attention_softmax_in_fp32=True, embedding_dropout=0.1, hidden_act="gelu_pytorch_tanh",
               layer_norm_epsilon=1e-5, mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm",
               num_key_value_heads=2, residual_dropout=0.1, rope_theta=999999.4420358813,
               scale_attention_softmax_in_fp32=True, scale_attn_weights=True, sliding_window=4096, use_bias=True),
        3_030_371_328,
    ),
    "Mixtral-8x7B": (
        config("mixtral", "MixtralForCausalLM", 32, 4096, 32, 14336, 32000, 32768, num_experts_per_tok=2,
               num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5,
               rope_theta=1e6, router_aux_loss_coef=0.02, sliding_window=None, **SILU, **UNTIED),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", "Qwen3MoeForCausalLM", 48, 2048, 32, 6144, 151936, 40960, decoder_sparse_step=1,
               head_dim=128, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
               num_experts=128, num_experts_per_tok=8, num_key_value_heads=4, output_router_logits=False,
               rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001,
               sliding_window=None, use_sliding_window=False, **SILU, **NO_BIAS, **UNTIED),
        30_532_122_624,
    ),
    "OLMoE-1B-7B": (
        config("olmoe", "OlmoeForCausalLM", 16, 2048, 16, 1024, 50304, 4096, clip_qkv=None, norm_topk_prob=False,
               num_experts=64, num_experts_per_tok=8, num_key_value_heads=16, output_router_logits=False,
               rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01, **SILU, **NO_BIAS,
               **UNTIED),
        6_919_161_856,
    ),
}  # fmt: skip
