"""Hugging Face tokenizers: the tokens are equal to those of `tokenizers` and `transformers`.

folder ─► saved: tokenizer.json, special tokens, chat template, a hash ─┬─► encoder: documents to tokens
                                                                        └─► chat: messages to text and loss spans
"""
