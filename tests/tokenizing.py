"""Tokenizers as Hugging Face saves them, made in place: what of them can differ, at a hundredth of their size."""

import json
import shutil
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# of Llama 3: words with the space before them, numbers by three digits, lines' ends with the marks before them
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|start|>{{ message['role'] }}<|end|>\n{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n{% endif %}"
)
TEXT = Path(json.__file__).read_text(), "ü ö 日本語 テキスト。 the cat didn't sit on the mat. " * 20


def write(folder, tokenizer, **config):
    """Returns a folder with a tokenizer and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama3(folder, template=CHAT):
    """Bytes within words of a regular expression; the post-processor of tokenizer.json adds the begin of a text."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end_of_text|>", "<|start|>", "<|end|>", "<|eot|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    around = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    return write(
        folder, made, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin|>", eos_token="<|end_of_text|>",
        chat_template=template,
    )  # fmt: skip


def llama2(folder):
    """No words at all: a space is a letter, one is put before the text; two keys say what is added to it."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    trained.decoder = decoders.Sequence(spaces)
    said = json.loads(trained.to_str())
    said["pre_tokenizer"], said["added_tokens"] = None, said["added_tokens"][:3]
    said["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return write(
        folder, Tokenizer.from_str(json.dumps(said)), tokenizer_class="LlamaTokenizer", unk_token="<unk>",
        eos_token="</s>", add_bos_token=True, add_eos_token=False, legacy=False,
        bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                   "single_word": False},
    )  # fmt: skip


def gpt2(folder):
    """Bytes within GPT-2's words; a space before the text is saved, and the config takes it back."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return write(folder, made, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def t5(folder):
    """Likeliest pieces, of normalized text; the end is added by the post-processor."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return write(
        folder, made, tokenizer_class="T5Tokenizer", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", extra_ids=0
    )


def copy(folder, to, template, *, end=True):
    """Copies a tokenizer with another template, or without the token that ends a text."""
    shutil.copytree(folder, to)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    kept = {key: value for key, value in config.items() if end or key != "eos_token"}
    (to / "tokenizer_config.json").write_text(json.dumps(kept))
