"""Makes the tiny models of this folder, and their logits, with transformers and torch: `python make.py`."""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SHAPE | {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 16}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama_tied": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "num_key_value_heads": 4},
                    attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SHAPE, n_positions=16)),
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    for name, make in MODELS.items():
        model = make().eval()
        with torch.no_grad():
            for value in model.parameters():  # biases and norms too, so that none can be swapped unseen
                value.normal_(std=0.3)
            logits = model(torch.tensor(np.arange(24).reshape(2, 12) * 7 % 40)).logits.numpy()
        folder = Path(__file__).parent / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / "logits.npy", logits)
