"""Decoder weights in Hugging Face's format: Llama and GPT-2, config.json and safetensors, no pickle."""
