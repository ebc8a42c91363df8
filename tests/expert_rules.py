"""What an expert writes for each bare model: columns, then rows, heads and vocabulary over `tensor`, nothing else.

`SMALL` are the models at widths of a test, `PUBLISHED` two layers of each at the widths that it was published in.
"""

import re
from functools import partial

import numpy as np
import unannotated as models

import jaxpar as jp

jp.simulate(8)  # before `jp.from_linen` asks for devices
TOKENS, SOUND = np.zeros((1, 16), np.int32), np.zeros((1, 64, 80), np.float32)
UP = {"(gate_proj|up_proj|wi_0|wi_1|fc1|linear1|intermediate/dense)/kernel": (None, "mlp")}
DOWN = {r"(down_proj|wo|fc2|linear2|\d/output/dense)/kernel": ("mlp", None)}
QKV = {"([qkv]_proj|[qkv]|query|key|value)/kernel": (None, "heads")}
OUT = {"(o_proj|o|out_proj|attention/output/dense)/kernel": ("heads", None)}
BIAS = {"([qv]_proj|query|key|value)/bias": ("heads",), "(fc1|linear1|intermediate/dense)/bias": ("mlp",)}
TABLE = {"(input_embedding|(embed_tokens|shared|word_embeddings|wte)/embedding)": ("vocab", None)}
HEAD = {"lm_head/(kernel|w)": (None, "vocab")}
RULES = {
    "Qwen3": {"[qkv]_proj/w": (None, "heads", None), "o_proj/w": ("heads", None, None)} | UP | DOWN | TABLE | HEAD,
    "Gemma": {"(q|attn_vec)_einsum/w": ("heads", None, None), "kv_einsum/w": (None,) * 4} | UP | DOWN | TABLE,
    "PaLI": {
        "(q|attn_vec)_einsum/w": ("layers", "heads", None, None), "kv_einsum/w": ("layers", *(None,) * 4),
        "gating_einsum": ("layers", None, None, "mlp"), "mlp/linear": ("layers", "mlp", None),
    } | TABLE,
    "Llama": QKV | OUT | UP | DOWN | TABLE | HEAD,
    "GPT2": {
        "c_attn/kernel": ("heads", None), "c_attn/bias": ("heads",), "attn/c_proj/kernel": (None, "heads"),
        "c_fc/kernel": ("mlp", None), "c_fc/bias": ("mlp",), "mlp/c_proj/kernel": (None, "mlp"),
    } | TABLE,
    "Bert": QKV | OUT | UP | DOWN | BIAS | TABLE | {"0/bias": ("vocab",)},
    "ViT": {
        "(query|key|value)/kernel": (None, "heads", None), "(query|key|value)/bias": ("heads", None),
        "out/kernel": ("heads", None, None),
    } | UP | DOWN | BIAS,
    "T5": QKV | OUT | UP | DOWN | TABLE | HEAD | {"relative_attention_bias/embedding": (None, "heads")},
    "Whisper": QKV | OUT | UP | DOWN | BIAS | TABLE,
}  # fmt: skip
SMALL = {
    "Qwen3": partial(models.Qwen3, 4096, 256, 512, 16, 8, 64),
    "Gemma": partial(models.Gemma, 4096, 256, 512, 8, 1, 64),
    "PaLI": jp.from_linen(models.PaLI(4096, 256, 512, 8, 1, 64), TOKENS),
    "Llama": jp.from_linen(models.Llama(4096, 256, 512, 8), TOKENS),
    "GPT2": jp.from_linen(models.GPT2(4096, 256, 8), TOKENS),
    "Bert": jp.from_linen(models.Bert(4096, 256, 512, 8), TOKENS),
    "ViT": partial(models.ViT, 256, 512, 8),
    "T5": jp.from_linen(models.T5(4096, 256, 512, 8, 32), TOKENS),
    "Whisper": jp.from_linen(models.Whisper(4096, 256, 8), SOUND, TOKENS),
}
# Qwen3-8B, Gemma-2B, PaliGemma's decoder, Llama-2-7B, GPT-2 medium, BERT-large, ViT-L/16, T5-large, Whisper-medium
PUBLISHED = {
    "Qwen3": partial(models.Qwen3, 151936, 4096, 12288, 32, 8, 128, layers=2),
    "Gemma": partial(models.Gemma, 256128, 2048, 16384, 8, 1, 256, layers=2),
    "PaLI": jp.from_linen(models.PaLI(257152, 2048, 16384, 8, 1, 256), TOKENS),
    "Llama": jp.from_linen(models.Llama(32000, 4096, 11008, 32, layers=2), TOKENS),
    "GPT2": jp.from_linen(models.GPT2(50257, 1024, 16, layers=2), TOKENS),
    "Bert": jp.from_linen(models.Bert(30522, 1024, 4096, 16, layers=2), TOKENS),
    "ViT": partial(models.ViT, 1024, 4096, 16, layers=2),
    "T5": jp.from_linen(models.T5(32128, 1024, 4096, 16, 64, layers=2), TOKENS),
    "Whisper": jp.from_linen(models.Whisper(51865, 1024, 16, layers=2), SOUND, TOKENS),
}


def by_hand(model, rules, sizes, devices):
    """Returns the layout of a model by rules, as far as its parameters have such paths."""
    known = jp.compose(model, jp.Parallel(**sizes), devices).placements
    paths = {end: dims for end, dims in rules.items() if any(re.search(rf"(^|/)({end})$", path) for path in known)}
    return jp.compose(model, jp.Parallel(**sizes, paths=paths), devices)
