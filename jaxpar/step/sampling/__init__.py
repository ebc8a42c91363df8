"""Samples tokens after prompts from a trained model: one compiled step per token of every row."""
