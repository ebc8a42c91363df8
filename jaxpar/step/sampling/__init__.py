"""Text from a trained model, on any layout: prompts in, tokens out, one compiled step for a token of every row."""
