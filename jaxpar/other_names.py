"""Finds the name that a misspelt word, or the word of another framework, stands for."""

import difflib
import re
from collections.abc import Sequence

# jaxpar's names to those of PyTorch, Megatron, torchtitan and Hugging Face for the same: by spelling alone, dp would be
# taken for fsdp, and hidden_size, which is the model's width, for hidden
_OTHER_NAMES = {
    "data": "dp ddp replica dp_size data_parallel", "fsdp": "dp_shard", "pipe": "pp stage pp_size pipeline_parallel",
    "tensor": "tp mp model tp_size tensor_parallel model_parallel", "context": "cp cp_size context_parallel",
    "sequence": "sp sequence_parallel", "expert": "ep ep_size expert_parallel", "zero": "zero_stage sharding",
    "dim": "hidden_size d_model n_embd embed_dim", "layers": "num_hidden_layers depth", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "hidden": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim",
    "activation": "hidden_act act_fn", "rope_base": "rope_theta", "windows": "sliding_window", "biases": "qkv_bias",
    "tied": "tie_word_embeddings", "ahead": "prefetch num_workers", "source": "dataset",
    "seq": "max_position_embeddings max_seq_len seq_length context_length block_size max_length",
    "learning_rate": "lr", "beta1": "b1 betas", "beta2": "b2", "clip": "max_grad_norm gradient_clipping",
    "weight_decay": "wd", "global_batch": "batch batch_size", "steps": "epochs num_epochs",
    "accumulate": "gradient_accumulation_steps grad_accum", "precision": "dtype bf16 mixed_precision",
    "remat": "gradient_checkpointing activation_checkpointing", "adapters": "lora", "eval_every": "eval_steps",
    "show_every": "log_every logging_steps", "loggers": "report_to wandb tensorboard", "keep_last": "save_total_limit",
    "every": "save_every save_steps save_interval", "start_from": "init_from resume_from", "dir": "output_dir save_dir",
}  # fmt: skip
OTHER_NAMES = {theirs: ours for ours, names in _OTHER_NAMES.items() for theirs in names.split()}
# those among them whose values are no values of jaxpar's key: a count of epochs, a switch, a pair, another spelling
OTHER_VALUES = set(
    "epochs num_epochs bf16 mixed_precision dtype betas num_workers sharding gradient_checkpointing "
    "activation_checkpointing lora wandb tensorboard report_to resume_from qkv_bias sliding_window act_fn".split()
)


def find_name(word: str, choices: Sequence[str]) -> str | None:
    """Returns the choice that a word stands for, or None.

    A word of another framework has its meaning there. If that is no choice, it may be the dim of an author that it
    names, or a choice of nearly the same spelling: by looser spelling dp would be fsdp, and depth a path.

    >>> find_name("shedule", ["schedule", "stages"]), find_name("dp", ["data", "fsdp"]), find_name("dp", ["fsdp"])
    ('schedule', 'data', None)
    >>> find_name("mlp_dim", ["hidden", "dim"]), find_name("mlp_dim", ["embed", "mlp"])
    ('hidden', 'mlp')
    """
    # in lower case, so that adamW is nearer to adamw than to adam; of names that differ in case only, the first
    names = {choice.lower(): choice for choice in reversed(choices)}
    ours = OTHER_NAMES.get(word.lower())
    if ours in choices:
        return ours
    if ours and (dim := re.sub("_(dim|size)$", "", word.lower())) in names:
        return names[dim]
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.85 if ours else 0.6)
    return names[close[0]] if close else None
