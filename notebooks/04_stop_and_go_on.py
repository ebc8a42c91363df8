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
# # Stop and go on
#
# A run on 2 x 2 x 2 devices is stopped, goes on with FSDP over eight, is stopped again, and ends on a single device.
# Beside it the same job runs through undisturbed. What should come out the same does; then a byte of a checkpoint is
# changed, which should not go unnoticed, and does not. At the end, two faults that are not the run's own: it is killed without a word, and fed
# a batch that cannot be.
#
# Devices are simulated on one processor: nothing here says how fast GPUs would be.

# %%
import json
import pydoc_data.topics
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

folder = Path(tempfile.mkdtemp())
(folder / "text.txt").write_text("\n".join(pydoc_data.topics.topics.values()))  # Python's own manual
(folder / "job.toml").write_text("""
[model]
name = "decoder"
layers = 2
dim = 64
heads = 4
[train]
steps = 90
global_batch = 16
[data]
source = "text"
path = "text.txt"
seq = 64
[mesh]
simulate = 8
[parallel]
data = 2
fsdp = 2
tensor = 2
[optimizer]
warmup = 10
[checkpoint]
every = 10
keep_last = 3
[metrics]
show_every = 30
""")


# %% [markdown]
# Everything below is the command `jaxpar`, as in a terminal. The second function stops a run as a cluster does that wants
# its machines back: with SIGTERM, at whatever moment.


# %%
def rows(run):
    file = folder / "runs" / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def start(*words):
    command = [sys.executable, "-m", "jaxpar", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(child):
    print(child.communicate()[0].strip())


def stop_after(step, run, child):
    while len(rows(run)) < step:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    end(child)


# %% [markdown]
# ## Undisturbed

# %%
end(start("train", "job.toml", "run.dir=runs/whole"))

# %% [markdown]
# ## Stopped on 2 x 2 x 2
#
# The step is finished, the state saved, and the command ends with status 143: stopped, as asked.

# %%
stop_after(25, "stopped", start("train", "job.toml", "run.dir=runs/stopped"))

# %%
end(start("checkpoint", "ls", "runs/stopped"))

# %% [markdown]
# ## On with FSDP over eight devices
#
# The same command, with another layout. A checkpoint holds whole arrays by their paths, not shards of a mesh: each device
# reads its own part of each. The data is a function of the step, so nothing is seen twice or left out.

# %%
EIGHT = ("parallel.data=1", "parallel.fsdp=8", "parallel.tensor=1")
stop_after(55, "stopped", start("train", "job.toml", "run.dir=runs/stopped", *EIGHT))

# %% [markdown]
# ## To the end on one device

# %%
ONE = ("mesh.simulate=1", "parallel.data=1", "parallel.fsdp=1", "parallel.tensor=1")
end(start("train", "job.toml", "run.dir=runs/stopped", *ONE))

# %% [markdown]
# ## The same run
#
# Until the first stop the losses are those of the undisturbed run bit for bit. From then on another layout adds up in another
# order, so that the last bits of a float32 differ.

# %%
whole, stopped = ({row["step"]: row["loss"] for row in rows(run)} for run in ("whole", "stopped"))
assert whole.keys() == stopped.keys()
steps = np.array(sorted(whole))
difference = np.array([abs(stopped[step] / whole[step] - 1) for step in steps])
first = steps[difference > 0][0]
print(f"the first loss that differs is of step {first}; the largest difference is {difference.max():.1e} of the loss")
assert first > 25
assert difference.max() < 1e-4

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, height_ratios=[2, 1], layout="constrained")
above.plot(steps, [whole[step] for step in steps], lw=5, alpha=0.3, label="undisturbed")
above.plot(steps, [stopped[step] for step in steps], lw=1.2, color="black", label="stopped twice")
above.set_ylabel("loss")
above.legend(frameon=False)
below.semilogy(steps, np.maximum(difference, 1e-9), ".", color="black")
below.set_ylabel("difference\n(0 at 1e-9)")
below.set_xlabel("step")
for name, at in (("2 x 2 x 2", 12), ("fsdp 8", 40), ("one device", 75)):
    below.annotate(name, (at, 2e-5), ha="center", fontsize=9, color="tab:blue")
below.set_ylim(5e-10, 2e-4)
plt.show()

# %% [markdown]
# ## A byte that changes on the disk
#
# One byte in the middle of the largest file of the newest checkpoint:

# %%
newest = max((folder / "runs" / "stopped" / "checkpoints").iterdir())
largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
data = bytearray(largest.read_bytes())
data[len(data) // 2] ^= 1
largest.write_bytes(data)
end(start("checkpoint", "verify", "runs/stopped"))

# %% [markdown]
# The run goes on from the newest checkpoint that is good, and says so:

# %%
end(start("train", "job.toml", "run.dir=runs/stopped", *ONE))

# %% [markdown]
# ## Killed without a word
#
# SIGKILL asks nobody: no step is finished, nothing is saved. **Predict** what is lost: with `checkpoint.every = 10`, the steps
# since the last multiple of ten. The same command makes them again, from the same batches: bit for bit as if nothing had been.

# %%
child = start("train", "job.toml", "run.dir=runs/killed", "train.steps=60")
while len(rows("killed")) < 33:
    time.sleep(0.01)
child.kill()
child.wait()
end(start("checkpoint", "ls", "runs/killed"))

# %%
end(start("train", "job.toml", "run.dir=runs/killed", "train.steps=60"))
end(start("train", "job.toml", "run.dir=runs/unhurt", "train.steps=60"))
killed, unhurt = ({row["step"]: row["loss"] for row in rows(run)} for run in ("killed", "unhurt"))
assert killed == unhurt
print(f"{len(killed)} losses, all of them the same bits")

# %% [markdown]
# ## A batch that cannot be
#
# Data of one's own, whose batch number 20 is damaged: a token that the vocabulary does not have. Fed to the model it would look up
# nothing, and the loss would be wrong without a word. **Predict**: batches are looked at before they are fed, so the run stops there, with the row.

# %%
(folder / "damaged.py").write_text("""
import numpy as np

TEXT = np.frombuffer(open("text.txt", "rb").read(), np.uint8).astype(np.int32)


class Damaged:
    def batch(self, step, size):
        rows = [TEXT[at : at + 65] for at in np.random.default_rng(step).integers(0, len(TEXT) - 65, size)]
        tokens = np.stack(rows)
        tokens[3, 7] += 70_000 * (step == 20)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
""")
OWN = ("data.source=damaged:Damaged", "data.path=", "run.dir=runs/damaged", "train.steps=40")
end(start("train", "job.toml", *OWN))

# %% [markdown]
# As predicted. If one batch of many is not worth a stop, a job says so in `[faults]`: the next one takes its place. The run goes on from its
# last checkpoint, and remembers for ever which batch it left out, so that it can be resumed anywhere.

# %%
end(start("train", "job.toml", *OWN, "faults.on_bad_batch=skip"))
print((folder / "runs" / "damaged" / "skipped_batches.json").read_text())

# %% [markdown]
# ## What to try next
#
# * `faults.spike = 3.0` with `on_bad_step = "rollback"`: what does a run do about a learning rate that is too high?
# * Stop a run on eight devices, and go on with a pipeline: `parallel.pipe=2`. Which losses are the same bits now?
# * `jaxpar report runs/stopped`: where are the stops, and the changes of the mesh?
