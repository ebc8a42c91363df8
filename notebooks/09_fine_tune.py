# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune a Llama
#
# A folder of Hugging Face's with a model, its tokenizer and its chat template is tuned with low-rank adapters on eight devices,
# evaluated, asked, and exported to a folder that `transformers` reads. Nothing is downloaded: the folder is made here, so small that all of it
# takes a minute. With a real one, its path is the only thing that changes.
#
# The eight devices are simulated on one processor: losses are those of eight real ones, and there are no times.

# %%
import json
import random
import subprocess
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# Everything below is the command `jaxpar`, as in a terminal.


# %%
def jaxpar(*words, said=""):
    command = [sys.executable, "-m", "jaxpar", *words]
    done = subprocess.run(command, cwd=folder, input=said, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


def rows(run):
    return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


# %% [markdown]
# ## 1. A tokenizer with a chat template
#
# A byte-pair encoding of 400 tokens, trained on what the model will read. A folder of Hugging Face's says beside it which tokens begin
# and end a text, and how a conversation is written down: a template, which is code, and runs in a sandbox.

# %%
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
week = [f"{a} is the day before {b}. {b} follows {a}. " for a, b in zip(DAYS, DAYS[1:] + DAYS[:1], strict=True)]
random.seed(0)
text = "".join(random.choices(week, k=4000))
(folder / "week.txt").write_text(text)

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    [text], trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
)
(folder / "words").mkdir()
tokenizer.save(str(folder / "words" / "tokenizer.json"))
config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
(folder / "words" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
print(tokenizer.encode("Monday is the day before Tuesday.").tokens)

# %% [markdown]
# ## 2. A Llama to begin with
#
# A decoder reads the text of the week for 150 steps, and is exported: `config.json`, `model.safetensors`, and the tokenizer with it.

# %%
(folder / "base.toml").write_text(f"""
model = {{name = "decoder", layers = 2, dim = 64, heads = 4, vocab = {tokenizer.get_vocab_size()}}}
data = {{source = "text", path = "week.txt", tokenizer = "words", seq = 64}}
train = {{steps = 150, global_batch = 16}}
optimizer = {{learning_rate = 0.01}}
mesh = {{simulate = 8}}
parallel = {{data = 2, fsdp = 2, tensor = 2}}
""")
print([line for line in jaxpar("train", "base.toml").splitlines() if line.startswith("step")][-1])
jaxpar("checkpoint", "export", "runs/base", "--format", "safetensors", "--to", "my-llama")
print(sorted(path.name for path in (folder / "my-llama").iterdir()))
print((folder / "my-llama" / "config.json").read_text()[:220], "...")

# %% [markdown]
# ## 3. Conversations
#
# 600 questions with answers, a line of JSON each. The model has read of days, but never a question.

# %%
ASKED = ["What comes after {}?", "Which day follows {}?", "Tell me the day after {}.", "It is {}. What is tomorrow?"]
talks = []
for _ in range(600):
    at = random.randrange(7)
    answer = f"The day after {DAYS[at]} is {DAYS[(at + 1) % 7]}."
    question = random.choice(ASKED).format(DAYS[at])
    talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
(folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
print(json.dumps(talks[0]))

# %% [markdown]
# ## 4. Adapters
#
# A low-rank adapter ([Hu et al. 2021](https://arxiv.org/abs/2106.09685)) adds $AB$ to a matrix $W$, where $A$ and $B$ are thin; $W$ itself is
# frozen: it has no gradient, computed or sent, and no optimizer state. Only answers are learned: the loss of questions is not counted.
#
# **Predict.** To a matrix of $n \times m$ an adapter of rank 8 adds $8 (n + m)$ numbers: some percent of the model.

# %%
(folder / "tune.toml").write_text("""
model = {name = "my-llama"}
data = {source = "jsonl", path = "talks.jsonl", messages = "messages", tokenizer = "my-llama", documents = "alone", seq = 48, held_out = 0.1}
train = {steps = 120, global_batch = 16, eval_every = 10, adapters = {rank = 8, paths = ["blocks/attention/*", "blocks/mlp/*"]}}
metrics = {evaluate = ["perplexity"], show_every = 60}
optimizer = {learning_rate = 0.01}
mesh = {simulate = 8}
parallel = {data = 2, fsdp = 2, tensor = 2}
""")
print(jaxpar("check", "tune.toml").splitlines()[0])
print(jaxpar("train", "tune.toml"))

# %%
base, tuned = (json.loads((folder / "runs" / run / "run.json").read_text())["parameters"] for run in ("base", "tune"))
print(f"{base:,} parameters, {tuned - base:,} of adapters: {(tuned - base) / base:.0%}")

# %% [markdown]
# More than some percent: a rank of 8 is an eighth of a width of 64. Of a Llama that is 4,096 wide it is a five-hundredth.

# %%
seen = [row for row in rows("tune") if "eval_perplexity" in row]
figure, ax = plt.subplots(figsize=(8, 3), dpi=110, layout="constrained")
ax.semilogy([row["step"] for row in seen], [row["eval_perplexity"] for row in seen], "o-")
ax.set(xlabel="step", ylabel="perplexity of answers, held out", title="Adapters of rank 8")
ax.spines[["top", "right"]].set_visible(False)
plt.show()
first, last = seen[0]["eval_perplexity"], seen[-1]["eval_perplexity"]
print(f"perplexity {first:.2f} after 10 steps, {last:.3f} after 120")
assert last < 0.8 * first

# %% [markdown]
# ## 5. Ask it
#
# `jaxpar sample RUN --chat` answers line by line, by the chat template. Each call here is a conversation of its own, as the model has
# been tuned on single questions.

# %%
for line in ("What comes after Friday?\n", "It is Sunday. What is tomorrow?\n"):
    print(jaxpar("sample", "runs/tune", "--chat", "--temperature", "0", said=line))

# %% [markdown]
# ## 6. Take it away
#
# An export adds the adapters to their matrices: a folder like the one that we began with. **Predict** which tensors differ: those with
# adapters, and no other.

# %%
jaxpar("checkpoint", "export", "runs/tune", "--format", "safetensors", "--to", "tuned")


def tensors(name):
    data = (folder / name / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")  # of a header in JSON: name to dtype, shape and place
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {key: data[8 + size :][slice(*entry["data_offsets"])] for key, entry in header.items()}


before, after = tensors("my-llama"), tensors("tuned")
assert before.keys() == after.keys()
same = sorted(name for name in before if before[name] == after[name])
print(f"{len(before) - len(same)} tensors differ; the same bytes are left in {', '.join(same)}")

# %% [markdown]
# As predicted. Does another library compute the same? Where `transformers` is installed, it reads the folder, writes the conversation down by the
# template, and goes on by the likeliest token.

# %%
if find_spec("transformers") and find_spec("torch"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its progress bars miss a package
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    words = AutoTokenizer.from_pretrained(folder / "tuned")
    asked = words.apply_chat_template(
        [{"role": "user", "content": "What comes after Friday?"}], add_generation_prompt=True, return_tensors="pt"
    )
    with torch.no_grad():
        how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": words.eos_token_id}
        answer = theirs.generate(asked, attention_mask=torch.ones_like(asked), **how)
    print("transformers:", words.decode(answer[0, asked.shape[1] :], skip_special_tokens=True))

# %% [markdown]
# ## 7. The run on one page
#
# `jaxpar report runs/tune` writes `report.html`: curves, checkpoints, events, and who holds what, in one file without scripts.

# %%
print(jaxpar("report", "runs/tune").replace(str(folder), "..."))

# %% [markdown]
# ## What to try next
#
# * `adapters = {rank = 1, ...}`, or `paths = ["blocks/attention/*"]`: how small may they be?
# * `adapters = {rank = 8, paths = [...], base = "int8"}` keeps their matrices in 8 bits: how many bytes does `jaxpar check tune.toml` say then, and what becomes of the perplexity?
# * `train.freeze = ["embed"]` in place of the adapters: what is trained then, and what does `jaxpar inspect tune.toml` say of the gradients that are sent?
# * Stop the run in the middle (Ctrl-C), and train it again.
# * `parallel = {fsdp = -1}` and no `[mesh]`: all GPUs of a machine.
