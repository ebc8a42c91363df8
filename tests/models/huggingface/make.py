"""Makes the tiny models of this folder, and their logits, with transformers and torch: `python make.py [NAME ...]`.

logits.npy   logits of 2 rows of 12 tokens
greedy.npy   50 tokens that transformers adds to the first 6 of them, of the models that can
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as t
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

SHAPE = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SHAPE | {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 16}
LONG = LLAMA | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GEMMA = LONG | {"num_hidden_layers": 4, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.3], "long_factor": [1.5, 3.0]}
MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "llama_tied": lambda: t.LlamaForCausalLM(
        t.LlamaConfig(**LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "num_key_value_heads": 4},
                      attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**SHAPE, n_positions=16)),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**LONG, head_dim=6, sliding_window=5)),
    "qwen2": lambda: t.Qwen2ForCausalLM(
        t.Qwen2Config(**LONG | {"num_hidden_layers": 3}, tie_word_embeddings=True, use_sliding_window=True,
                      sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**LONG, head_dim=8, attention_bias=True)),
    "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**LONG | {"num_key_value_heads": 4, "hidden_size": 32})),
    "phi3": lambda: t.Phi3ForCausalLM(
        t.Phi3Config(**LONG | {"hidden_size": 32}, sliding_window=7, partial_rotary_factor=0.5)
    ),
    "phi3_longrope": lambda: t.Phi3ForCausalLM(  # the short factors, as 12 tokens are less than 16
        t.Phi3Config(**LONG | {"hidden_size": 32, "max_position_embeddings": 60}, partial_rotary_factor=0.5,
                     original_max_position_embeddings=16, rope_scaling=LONGROPE)
    ),
    "phi3_longer": lambda: t.Phi3ForCausalLM(  # the long factors
        t.Phi3Config(**LONG, original_max_position_embeddings=5, rope_scaling=LONGROPE)
    ),
    "llama_yarn": lambda: t.LlamaForCausalLM(
        t.LlamaConfig(**LONG, head_dim=8, rope_theta=50.0,
                      rope_scaling=YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3})
    ),
    "qwen3_yarn": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**LONG, head_dim=8, rope_theta=50.0, rope_scaling=YARN)),
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**LONG)),
    "smollm3": lambda: t.SmolLM3ForCausalLM(t.SmolLM3Config(**LONG | {"num_hidden_layers": 4})),
    "granite": lambda: t.GraniteForCausalLM(
        t.GraniteConfig(**LONG, embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.7,
                        attention_multiplier=0.3, mlp_bias=True)
    ),
    "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**LONG | {"intermediate_size": 48}, head_dim=8)),
    "olmo": lambda: t.OlmoForCausalLM(t.OlmoConfig(**LONG)),
    "gemma2": lambda: t.Gemma2ForCausalLM(
        t.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7}, rope_scaling={"rope_type": "linear", "factor": 8.0})
    ),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**{key: LONG[key] for key in LONG if key != "num_key_value_heads"} | {"hidden_size": 32})
    ),
    "pythia": lambda: t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**{key: LONG[key] for key in LONG if key != "num_key_value_heads"},
                        use_parallel_residual=False, rotary_pct=1.0, attention_bias=False)
    ),
    "starcoder2": lambda: t.Starcoder2ForCausalLM(
        t.Starcoder2Config(**LONG | {"hidden_size": 32, "intermediate_size": 96}, sliding_window=5)
    ),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**LONG, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**LONG, **EXPERTS, norm_topk_prob=True)),
    "olmoe": lambda: t.OlmoeForCausalLM(t.OlmoeConfig(**LONG, num_experts=4, num_experts_per_tok=2)),
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or MODELS:
        model = MODELS[name]().eval()
        model.set_attn_implementation("eager")  # the only one with softcaps
        tokens = torch.tensor(np.arange(24).reshape(2, 12) * 7 % 40)
        with torch.no_grad():
            for value in model.parameters():  # biases and norms too, so that none can be swapped unseen
                value.normal_(std=0.3)
            logits = model(tokens).logits.numpy()
        folder = Path(__file__).parent / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / "logits.npy", logits)
        if getattr(model.config, "max_position_embeddings", 0) > 60:
            ones = torch.ones_like(tokens[:, :6])
            greedy = model.generate(tokens[:, :6], attention_mask=ones, max_new_tokens=50, do_sample=False)
            np.save(folder / "greedy.npy", greedy.numpy().astype(np.int16))
