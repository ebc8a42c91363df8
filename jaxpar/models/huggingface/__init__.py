"""Weights of a decoder as Hugging Face keeps them: Llama and GPT-2, config.json and safetensors, no pickle."""
