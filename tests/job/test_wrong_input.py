"""What is wrong is said, with the rule and a fix: no traceback, no guess, no silent other value.

JOBS      job files                  `loads` and `check`; no device is used and nothing is compiled
VALUES    the same from Python       `jp.compose`, `jp.init_state`, `jp.train_step`, the step
RUNS      damaged run folders        `jaxpar.job.run.train` going on from them
COMMANDS  the command line           status and stderr
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import misuse
import numpy as np
import optax
import pytest
import tokenizing
from flax import nnx
from misuse import BATCH, Lin, Net, X, Y
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load, loads
from jaxpar.job.sample import SamplingRequest, sample
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.pipeline.tables.csv import to_csv
from jaxpar.pipeline.tables.library import schedule
from jaxpar.step.losses import cross_entropy
from jaxpar.step.sampling import Sampling

jp.simulate(8)

DECODER = """
[mesh]
simulate = 8
[parallel]
data = 2
fsdp = 2
tensor = 2
[model]
layers = 1
dim = 32
heads = 4
[data]
seq = 64
[train]
steps = 40
"""
OWN = """
[mesh]
simulate = 8
[parallel]
data = 8
[model]
name = "misuse:Net"
[data]
source = "misuse:batches"
[train]
steps = 40
global_batch = 16
loss = "classify"
"""
PIPE = DECODER.replace("data = 2\nfsdp = 2\ntensor = 2", "pipe = 4\ndata = 2").replace("layers = 1", "layers = 4")
CUT = OWN.replace("data = 8", "pipe = 4\ndata = 2").replace("misuse:Net", "misuse:Piped")
CHAT = DECODER.replace(
    "seq = 64",
    'seq = 64\nsource = "jsonl"\npath = "HERE/talks.jsonl"\nmessages = "messages"\ntokenizer = "HERE/llama"',
)
ARRAYS = OWN.replace('"misuse:batches"', '"arrays"').replace("misuse:Net", "mlp")
TEMPLATES = {  # folders of one tokenizer, by what is wrong with their templates
    "mute": "", "endless": tokenizing.CHAT, "unclosed": "{% for message in messages %}",
    "first": "{{ messages | length }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "escaping": "{{ messages.append(1) }}",
}  # fmt: skip
LEAKS = ("Traceback", "pydantic", "Errno", "tuple[", "list[str]", "null", " a integer", " a array", "allow_pickle")


def said(error, *words, problems=1):
    """Asserts that an error says these words in so many problems, each with a rule and a fix, and leaks nothing."""
    text = str(error)
    assert len(error.problems) == problems, text
    assert all(problem.got and problem.rule and problem.fix for problem in error.problems), text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in:\n{text}"
    leaked = [leak for leak in LEAKS if leak in text]
    assert not leaked, f"{leaked} in:\n{text}"


def checked(text, *overrides):
    """Returns a job that can be trained; raises what is wrong with it."""
    job = loads(text, overrides, allow_import=True)
    if problems := check(job):
        raise JaxparError(*problems)
    return job


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder of texts, arrays, modules and jobs, good and bad."""
    folder = tmp_path_factory.mktemp("here")
    files = {
        "ok.txt": b"all is well. " * 500, "short.txt": b"hello", "empty.txt": b"", "text.npz": b"1,2,3\n",
        "empty.npz": b"", "syntax.py": b"def f(:", "raising.py": b"raise RuntimeError('not here')",
        "leaving.py": b"exit(3)", "missing_part.py": b"import no_such_package", "bad.toml": b"[train\nsteps = 3",
        "binary.toml": b"\xff\xfe[train]", "windows.toml": b"\xef\xbb\xbf" + DECODER.encode(),
        "ok.toml": DECODER.encode(), "own.toml": OWN.encode(), "pipe.toml": PIPE.encode(), "file": b"",
        "two.csv": to_csv(schedule("1f1b", stages=2, microbatches=4)).encode(), "half.csv": b"1f1b,stages=4",
        "binary.csv": b"\xff\xfe", "broken.parquet": b"PAR1", "ok.jsonl": b'{"text": "all is well"}\n' * 99,
        "talks.jsonl": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
        b' "id": 7}',
        "tools.jsonl": b'{"messages": [{"role": "tool", "content": "a"}]}',
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
    inputs, labels = np.zeros((64, 64), np.float32), np.arange(64) % 10
    (folder / "older").mkdir()
    (folder / "older" / "vocab.json").write_text("{}")
    tokenizing.llama3(folder / "llama")
    for name, template in TEMPLATES.items():
        tokenizing.copy(folder / "llama", folder / name, template, end=name != "endless")
    np.savez(folder / "ok.npz", inputs=inputs, labels=labels)
    np.savez(folder / "lengths.npz", inputs=inputs, labels=labels[:60])
    np.savez(folder / "objects.npz", inputs=np.array([object()] * 4), labels=labels)
    np.savez(folder / "strings.npz", inputs=inputs, labels=np.array(["a"] * 64))
    np.savez(folder / "scalar.npz", inputs=inputs, labels=np.int32(3))
    np.savez(folder / "rowless.npz", inputs=inputs[:0], labels=labels[:0])
    np.savez(folder / "columns.npz", inputs=inputs, labels=labels[:, None])
    np.savez(folder / "large.npz", inputs=inputs, labels=labels + 2**40)
    np.savez(folder / "unnamed.npz", inputs, labels)
    ok = (folder / "ok.npz").read_bytes()
    (folder / "half.npz").write_bytes(ok[: len(ok) // 2])
    (folder / "flipped.npz").write_bytes(ok[:600] + bytes(byte ^ 255 for byte in ok[600:700]) + ok[700:])
    (folder / "nothing").mkdir()
    return folder


# The job, what is wrong (overrides, "; " between them), and words of the one problem. HERE is the folder above.
JOBS = [
    # spelling
    (DECODER, "train.step=5", "train.step", "did you mean 'steps'?"),
    (DECODER, "trian.steps=5", "[trian]", "did you mean 'train'?"),
    (DECODER, "model.layer=2", "model.layer", "did you mean 'layers'?"),
    (DECODER, "parallel.tenser=2", "parallel.tenser", "did you mean 'tensor'?"),
    (DECODER, "model.name=decodr", "'decodr'", "did you mean 'decoder'?"),
    (DECODER, "train.loss=nexttoken", "'nexttoken'", "did you mean 'next_token'?"),
    (DECODER, "train.remat=ful", '"ful"', "did you mean 'full'?"),
    (DECODER, "train.precision=fp16", '"fp16"', "'bf16'"),
    (DECODER, "train.precision={compute='bf16', alow=[]}", "unknown key train.precision.alow", "did you mean 'allow'"),
    (DECODER, "train.precision.allow=['Router.*']", "precision fp32 with allow", 'compute="bf16"'),
    (DECODER, "optimizer.name=adamv", '"adamv"', "'adam'"),
    (DECODER, "data.source=txt", "'txt'", "did you mean 'text'?"),
    (DECODER, "run.resume=always", '"always"', "auto, must, never"),
    # types
    (DECODER, "train.steps=true", "train.steps = true", "integer"),
    (DECODER, "train.steps=1.5", "train.steps = 1.5", "integer"),
    (DECODER, "train.steps=[1]", "train.steps = [1]", "integer"),
    (DECODER, "train.steps=", 'train.steps = ""', "integer"),
    (DECODER, "parallel.data='8'", 'parallel.data = "8"', "integer"),
    (DECODER, "parallel.zero='3'", 'parallel.zero = "3"', "integer"),
    (DECODER, "parallel.sequence=yes", '"yes"', "true or false"),
    (DECODER, "optimizer.learning_rate=fast", '"fast"', "number"),
    (DECODER, "model.name=5", "model.name = 5", "decoder"),
    (DECODER, "data.path=5; data.source=text", "data.path = 5", "path"),
    (DECODER, "parallel.rules.mlp=5", "mlp = 5", "rules"),
    (DECODER, "parallel.paths.head=embed", '"embed"', "paths"),
    (
        DECODER,
        "data.path=\udcff; data.source=text",
        "data.path",
        "file",
    ),  # bytes that are no utf-8, on the command line
    # overrides
    (DECODER, "train.steps", "'train.steps'", "section.key=value"),
    (DECODER, "steps=5", "'steps=5'", "section.key=value"),
    (DECODER, "parallel.data.x=3", "data is no table", "section.key=value"),
    # ranges
    (DECODER, "train.steps=0", "train.steps = 0", "steps = "),
    (DECODER, "train.steps=99999999999999999999", "train.steps = 9999", "steps"),
    (DECODER, "train.seed=-1", "train.seed = -1", "seed = 0"),
    (DECODER, "train.seed=4294967296", "train.seed = 4294967296", "seed"),  # JAX would take its lower 32 bits: seed 0
    (DECODER, "train.accumulate=0", "train.accumulate = 0", "accumulate = 1"),
    (DECODER, "optimizer.learning_rate=nan", "optimizer.learning_rate = nan", "learning_rate = "),
    (DECODER, "optimizer.learning_rate=inf", "optimizer.learning_rate = inf", "learning_rate = "),
    (DECODER, "optimizer.beta1=1.0", "optimizer.beta1 = 1.0", "beta1 = "),  # the mean of gradients would never move
    (DECODER, "optimizer.clip=-1.0", "optimizer.clip = -1.0", "clip = "),
    (DECODER, "optimizer.weight_decay=inf", "optimizer.weight_decay = inf", "weight_decay = "),
    (DECODER, "optimizer.name=sgd; optimizer.weight_decay=0.1", "weight_decay = 0.1", "sgd", "adamw"),
    (DECODER, "data.held_out=0.9", "data.held_out = 0.9", "held_out = "),
    (DECODER, "checkpoint.keep_last=0", "checkpoint.keep_last = 0", "keep_last = "),
    (DECODER, "metrics.show_every=0", "metrics.show_every = 0", "show_every = "),
    (DECODER, "mesh.devices=8", "mesh.simulate = 8", "mesh.devices = 8", "leave one out"),
    # sizes
    (DECODER, "parallel.data=-1; parallel.fsdp=-1", "data=-1 and fsdp=-1", "give data a number"),
    (DECODER, "parallel.data=3", "data=3", "12 devices", "data=2"),
    (DECODER, "parallel.data=0", "data=0", "positive"),
    (DECODER, "parallel.zero=5", "zero=5", "zero=3"),
    (DECODER, "parallel.zero=3; parallel.fsdp=1; parallel.data=4", "zero=3 with fsdp=1", "fsdp=2"),
    (DECODER, "parallel.zero=3; parallel.fsdp=-1; parallel.data=4", "zero=3 with fsdp=1", "fsdp=2"),
    (DECODER, "parallel.sequence=true; parallel.tensor=1; parallel.data=4", "sequence=True with tensor=1", "tensor=2"),
    (DECODER, "parallel.sequence=true; data.seq=63", "63", "tensor", "64"),
    (DECODER, "parallel.context=2; parallel.data=1; data.seq=63", "63", "context", "64"),
    (DECODER, "parallel.context=2; parallel.data=1; parallel.sequence=true; data.seq=66", "66", "context", "68"),
    (DECODER, "parallel.context=0", "context=0", "positive"),
    (DECODER, "parallel.context=long", '"long"', "an integer"),
    (DECODER, "train.global_batch=33", "global_batch = 33", "global_batch = 36"),
    (DECODER, "train.accumulate=3", "accumulate=3", "global_batch = 36"),
    (DECODER, "model.heads=3", "heads = 3", "heads = 2"),
    (DECODER, "model.heads=0", "heads = 0", "at least 1"),
    (DECODER, "model.kv_heads=3", "kv_heads = 3", "kv_heads = 2"),
    (DECODER, "model.kv_heads=-1", "kv_heads = -1", "kv_heads = "),
    (DECODER, "model.hidden=-1", "hidden = -1", "hidden = "),
    (DECODER, "model.rope_base=0.0", "rope_base = 0.0", "rope_base = "),
    (DECODER, "model.vocab=100", "model.vocab = 100", "256"),
    (DECODER, "model.position=learned; model.seq=8", "model.seq = 8", "model.seq = 64"),
    # rules
    (DECODER, "parallel.rules.foo=tensor", "'foo' matches nothing", "one of"),
    (DECODER, "parallel.rules.mlp=tensr", "'tensr'", "did you mean 'tensor'?"),
    (DECODER, "parallel.rules.mlp=pipe", "'pipe'", "one of: data, fsdp, context, tensor"),  # no such axis in this mesh
    (DECODER, "parallel.rules.mlp=['tensor', 'tensor']", "tensor", "mlp"),
    (DECODER, "parallel.paths.haed=['embed', 'vocab']", "'haed'", "did you mean 'head'?"),
    (DECODER, "parallel.paths.head=['embed', 'mlp', 'vocab']", "3 dims of head", "2 dims or fewer"),
    (DECODER, "parallel.paths.[=['embed']", "'['", "regular expression"),
    (DECODER, "parallel.paths.*/key=['embed']", "'*/key'", "regular expression"),
    # the pipeline: its table
    (PIPE, "parallel.pipeline.schedul=1f1b", "parallel.pipeline.schedul", "did you mean 'schedule'?"),
    (PIPE, "parallel.pipeline.microbatches=8.0", "parallel.pipeline.microbatches = 8.0", "integer", "microbatches = 8"),
    (PIPE, "parallel.pipeline.schedule=1", "parallel.pipeline.schedule = 1", "string", '"auto"'),
    (PIPE, "parallel.pipeline.keep=input", "parallel.pipeline.keep", "did you mean 'inputs'?"),
    (PIPE, "parallel.pipeline=1f1b", 'parallel.pipeline = "1f1b"', "[parallel.pipeline] on a line of its own"),
    (PIPE, "parallel.microbatches=8", "parallel.microbatches", "microbatches belongs to [parallel.pipeline]"),
    (PIPE, "microbatches.x=8", "[microbatches]", "one of"),
    (PIPE, "pipeline.microbatches=8", "[pipeline]", "fix:  [parallel.pipeline]"),
    (PIPE, "parallel.pipeline.chunks.x=2", "chunks = {x = 2}", "integer"),
    # its numbers
    (PIPE, "parallel.pipe=3", "pipe=3", "6 devices", "pipe=4"),
    (PIPE, "parallel.pipe=1; parallel.data=8; parallel.pipeline.microbatches=4", "pipe=1", "pipe=2 or more"),
    (PIPE, "parallel.pipeline.microbatches=-8", "microbatches=-8", "microbatches=0"),
    (PIPE, "parallel.pipeline.microbatches=2000000; train.global_batch=4000000", "cells", "fewer microbatches"),
    (PIPE, "train.global_batch=24", "global_batch = 24", "microbatches=8", "global_batch = 32"),
    (PIPE, "parallel.pipeline.microbatches=3", "microbatches=3", "global_batch = 36"),
    (PIPE, "train.accumulate=2", "accumulate = 2 with pipe=4", "parallel.pipeline.microbatches = 16"),
    (PIPE, "parallel.pipeline.schedule=interleaved", "4 layers in 8 parts", "8 layers"),
    (PIPE, "parallel.pipeline.schedule=1f1b_phase", "'1f1b_phase'", "did you mean '1f1b_phased'?"),
    (PIPE, "parallel.pipeline.chunks=3", "chunks=3", "chunks=1", '"interleaved"'),
    (PIPE, "parallel.pipeline.schedule=zb_v; parallel.pipeline.chunks=1", "zb_v with chunks=1", "chunks=2"),
    (
        PIPE,
        "parallel.pipeline.schedule=interleaved; parallel.pipeline.microbatches=2; model.layers=8",
        "microbatches=2",
        "microbatches=4",
    ),
    (
        PIPE,
        "parallel.pipeline.schedule=zb_h2; parallel.pipeline.microbatches=4",
        "zb_h2",
        "at least 7",
        "microbatches=7",
    ),
    (PIPE, "parallel.pipeline.schedule=HERE/none.csv", "none.csv", "No such file", "1f1b_phased"),
    (PIPE, "parallel.pipeline.schedule=HERE/binary.csv", "binary.csv", "CSV file"),
    (PIPE, "parallel.pipeline.schedule=HERE/half.csv", "stages=4"),
    (PIPE, "parallel.pipeline.schedule=HERE/two.csv", "pipe = 4", "has 2", "pipe = 2"),
    # when its weights change
    (PIPE, "parallel.pipeline.weights=stashed", "parallel.pipeline.weights", "did you mean 'stash'?"),
    (
        PIPE,
        "parallel.pipeline.weights=stash; parallel.data=1; parallel.fsdp=2",
        "weights='stash' with fsdp=2",
        "fsdp=1 and data=2",
    ),
    (
        PIPE,
        "parallel.pipeline.weights=2bw; parallel.pipeline.microbatches=2",
        "microbatches=2 on pipe=4",
        "microbatches=4",
    ),
    (PIPE, "parallel.pipeline.weights=stash; parallel.pipeline.schedule=zb_h1", "zb_h1", 'schedule="1f1b"'),
    (PIPE, "parallel.pipeline.weights=stash; model.tied=true", "embed is read before", "untied"),
    # what it cannot cut
    (CUT, "model.name=resnet", "ResNet has no stack of layers", "pipe=1"),
    (CUT, "model.name=mlp", "MLP has no stack of layers", "pipe=1"),
    (CUT, "model.name=misuse:Net", "Net has no stack of layers", "nnx.vmap"),
    (CUT, "model.name=misuse:Lin", "Lin has no stack of layers", "nn.scan"),
    (CUT, "model.name=misuse:Normed", "Normed keeps state", "LayerNorm"),
    (CUT, "model.name=misuse:ReadsOutside", "a/bias", "layers", "pass it"),
    (CUT, "model.name=misuse:Uncut", "does not call jp.pipelined", "x = jp.pipelined(layers, x)", 'stages="found"'),
    (CUT, "model.name=misuse:CutTwice", "calls jp.pipelined 2 times", "once"),
    (CUT, "model.name=misuse:ScalesByState", "or what follows from it", "through x"),  # it would be that of zeros
    (CUT, "model.name=misuse:NormedInside", "NormedInside keeps state", "LayerNorm"),
    (PIPE, "model.layers=6", "dim 0 (layers) of [6, 32, 4, 8]", "pipe=3"),
    (PIPE, "parallel.rules.embed=pipe", "rule embed -> 'pipe'", "one of: data, fsdp, context, tensor"),
    (CUT, "model.name=misuse:ReadsItsLayersAfter", "blocks/w outside of its layers", "jp.pipelined(layers, x)"),
    (CUT, "model.name=misuse:NarrowsInside", "float32[1, 16] and return float32[1, 8]", "before or after"),
    (CUT, "train.loss=misuse:mean", "a scalar loss", "(sum, count)"),
    (CUT, "train.loss=misuse:wrong_key", "'label'", "labels int32[16]"),
    # the user's own code
    (OWN, "model.name=nowhere:Net", "No module named 'nowhere'", "working directory"),
    (OWN, "model.name=misuse:Nett", "'misuse:Nett'", "did you mean 'Net'?"),
    (OWN, "model.name=:Net", "':Net'", "package.module:Object"),
    (OWN, "model.name=..x:Net", "'..x:Net'", "package.module:Object"),
    (OWN, "model.name=syntax:f", "syntax.py, line 1", "python -c 'import syntax'"),
    (OWN, "model.name=raising:f", "not here", "python -c 'import raising'"),
    (OWN, "model.name=leaving:f", "leaving", "python -c 'import leaving'"),
    (OWN, "model.name=missing_part:f", "missing_part imports no_such_package", "install no_such_package"),
    (OWN, "model.name=misuse:number", "is a int", "class"),
    (OWN, "model.name=misuse:NeedsSize", "it also needs size", "lambda rngs"),
    (OWN, "model.name=misuse:RaisesWhenMade", "no such weights", "misuse.py"),
    (OWN, "model.name=misuse:RaisesWhenCalled", "to do", "misuse.py"),
    (OWN, "model.name=misuse:WrongWidth", "(64,)", "(16,)"),
    (OWN, "model.name=misuse:NoParameters", "no parameters"),
    (OWN, "model.name=misuse:IntegerParameter", "steps", "int32", "nnx.Variable"),
    (OWN, "model.name=misuse:OverAnnotated", "w of shape [64, 10]", "one name (or None) per dim"),
    (OWN, "model.name=misuse:ArrayAttribute", "table", "nnx.data"),
    (OWN, "model.name=misuse:WrongConstrain", "batch", "embed"),
    (OWN, "model.witdh=8", "witdh", "did you mean 'width'?"),
    (OWN, "model.width=wide", "'wide'"),
    (OWN, "model.name=misuse:EmptyParameter", "[0, 4]", "empty"),  # trained, and then Orbax could not save it
    (OWN, "model.name=misuse:Lin; model.witdh=8", "witdh", "width"),
    (OWN, "model.name=misuse:Lin; train.loss=misuse:wrong_key", "'label'"),
    (OWN, "train.loss=misuse:vector", "float32[16]", "jnp.sum(losses), losses.size"),
    (OWN, "train.loss=misuse:without_loss", "lss", '"loss"'),
    (OWN, "train.loss=misuse:mean; train.accumulate=2", "accumulate=2", "(sum, count)"),
    (OWN, "train.loss=misuse:mean_and_aux", "accuracy", "(sum, count)"),
    (OWN, "train.loss=misuse:wrong_key", "'label'", "labels int32[16]"),
    (OWN, "train.loss=misuse:raises", "no luck", "misuse.py"),
    (OWN, "train.loss=misuse:python_if", "boolean", "misuse.py"),
    (OWN, "train.loss=misuse:whole_number", "int32", "float32"),
    (OWN, "train.loss=misuse:takes_names", "tokens", "another name"),
    (OWN, "train.loss=math:pi", "'math:pi' is a float", "function"),
    (OWN, "train.loss=next_token", "'targets'", "data.source"),
    (OWN, "data.source=misuse:not_dicts", "misuse:not_dicts", "{'inputs': x, 'labels': y}"),
    (OWN, "data.source=misuse:strings", "labels", "<U1"),
    (OWN, "data.source=misuse:ragged", "inputs", "misuse:ragged"),
    (OWN, "data.source=misuse:half_a_batch", "[8, 64]", "global_batch = 16"),
    (OWN, "data.source=misuse:once", "generator", "function"),  # to check it would be to use it up
    (OWN, "data.source=misuse:breaks", "the disk is gone", "misuse.py"),
    (OWN, "data.source=misuse:needs_path", "'path'", "defaults"),
    (OWN, "data.source=misuse:number", "is a int", "yield"),
    (OWN, "data.source=misuse:source", "misuse:source", "batch(step, size)"),
    # data
    (DECODER, "data.path=HERE/ok.txt", "data.path", "'stdlib'", 'source = "text"'),  # would train on something else
    (DECODER, "data.source=text", "'text' without a path", "path ="),
    (DECODER, "data.source=text; data.path=HERE/none.txt", "none.txt", "names no file"),
    (DECODER, "data.source=text; data.path=HERE/**x", "**x", "glob"),
    (DECODER, "data.source=text; data.path=~nobody_here/x", "~nobody_here", "glob"),
    (DECODER, "data.source=text; data.path=HERE; data.pattern=*.doc", "*.doc", "names no file"),
    (DECODER, "data.source=text; data.path=HERE/short.txt", "6 tokens", "data.seq = 2"),
    (DECODER, "data.source=text; data.path=HERE/empty.txt", "text", "another data.path"),
    (DECODER, "data.path=HERE/talks.jsonl", "data.path", 'source = "text"'),
    (DECODER, "data.source=HERE/talks.jsonl", "talks.jsonl", 'source = "jsonl"'),
    (DECODER, "data.source=jsonl", "'jsonl' without a path", "path ="),
    (
        DECODER,
        "data.source=jsonl; data.path=HERE/talks.jsonl",
        "line 1 has no column 'text'",
        "its columns: messages, id",
    ),
    (DECODER, "data.source=jsonl; data.path=HERE/talks.jsonl; data.column=id", "line 1: id is 7", "column of text"),
    (DECODER, "data.source=jsonl; data.path=HERE/ok.txt", "line 1 is broken", "sed -n 1p ok.txt"),
    (DECODER, "data.source=jsonl; data.path=HERE/empty.txt", "empty.txt has no row", "another data.path"),
    (DECODER, "data.source=parquet; data.path=HERE/broken.parquet", "broken.parquet", "is Parquet"),
    (DECODER, "data.source=jsonl; data.path=HERE/talks.jsonl; data.messages=messages", "data.messages", "tokenizer ="),
    (DECODER, "data.end=</s>", "data.end = '</s>'", "leave it out"),
    (DECODER, "data.documents=appart", "appart", "apart"),
    (DECODER, "data.learn=questions", "questions", "answers"),
    (DECODER, "data.weights=[0.5, 0.5]", "[0.5, 0.5] for 1 of data.path", "weights = [0.7, 0.3]"),
    (DECODER, "data.source=text; data.path=['HERE/ok.txt', 'HERE/short.txt']; data.weights=[1, -1]", "-1", "positive"),
    (DECODER, "data.evaluation=misuse:batches", "misuse:batches", "data.held_out"),
    (DECODER, "data.tokenizer=HERE/none", "none", "no such file or folder", 'tokenizer = "bytes"'),
    (DECODER, "data.tokenizer=byte", "'byte'", 'tokenizer = "bytes"'),
    (DECODER, "data.tokenizer=HERE/ok.toml", "ok.toml", "saved as JSON"),
    (DECODER, "data.tokenizer=HERE/older", "of an older kind", "save_pretrained"),
    (DECODER, "data.tokenizer=HERE/llama; model.vocab=128256", "128256", "500 tokens", "padding"),
    (DECODER, "data.tokenizer=HERE/llama; model.vocab=400", "400", "500 tokens", "a row for every token"),
    (DECODER, "data.tokenizer=HERE/llama; data.end=<stop>", "data.end = '<stop>'", "is a token of"),
    (DECODER, "data.tokenizer=HERE/endless", "names no eos_token", "data.end"),
    (CHAT, "data.messages=talk", "line 1 has no column 'talk'", "its columns: messages, id"),
    (CHAT, "data.messages=id", "line 1: id is 7", "{role, content}"),
    (CHAT, "data.path=HERE/tools.jsonl", "line 1: the chat template", "no tools"),
    (CHAT, "data.tokenizer=HERE/mute", "no chat template", "chat_template.jinja"),
    (CHAT, "data.tokenizer=HERE/unclosed", "the chat template of", "is jinja"),
    (CHAT, "data.tokenizer=HERE/first", "message 1 changes how the template renders", 'data.learn = "all"'),
    (CHAT, "data.tokenizer=HERE/escaping", "line 1: the chat template", "SecurityError"),
    (OWN, "data.evaluation=misuse:number", "is a int", "read again for every evaluation"),
    (OWN, "data.documents=apart; data.source=jsonl; data.path=HERE/ok.jsonl", "takes no segments", "'alone'"),
    (ARRAYS, "data.path=HERE/none.npz", "none.npz", "No such file"),
    (ARRAYS, "data.path=['HERE/ok.npz']", "ok.npz']", "one .npz"),
    (ARRAYS, "data.path=HERE/empty.npz", "empty.npz", "np.savez"),
    (ARRAYS, "data.path=HERE/text.npz", "text.npz", "np.savez"),
    (ARRAYS, "data.path=HERE/half.npz", "half.npz", "np.savez"),
    (ARRAYS, "data.path=HERE/flipped.npz", "flipped.npz", "np.savez"),
    (ARRAYS, "data.path=HERE/objects.npz", "objects.npz", "np.savez"),
    (ARRAYS, "data.path=HERE/nothing", "no arrays", "np.savez"),
    (ARRAYS, "data.path=HERE/lengths.npz", "64 inputs, 60 labels", "as many rows"),
    (ARRAYS, "data.path=HERE/strings.npz", "labels", "<U1"),
    (ARRAYS, "data.path=HERE/scalar.npz", "labels", "[]"),
    (ARRAYS, "data.path=HERE/rowless.npz", "[0, 64]"),
    (ARRAYS, "data.path=HERE/columns.npz", "[16, 1]", "labels"),  # [n, 1] against [n] broadcasts to [n, n]
    (ARRAYS, "data.path=HERE/large.npz", "1099511627", "labels"),  # 2**40 as int32 is 0
    (ARRAYS, "data.path=HERE/unnamed.npz", "arr_0", "'inputs'"),
    (ARRAYS, "data.path=HERE/ok.npz; model.classes=5", "classes = 5", "classes = 10"),  # a label of none has no loss
    (ARRAYS, "data.path=HERE/ok.npz; model.inputs=63", "(63,)", "(64,)"),
    (ARRAYS, "data.path=HERE/ok.npz; model.dim=0", "dim = 0", "dim = "),
    (ARRAYS, "data.path=HERE/ok.npz; model.name=vit; model.patch=0", "patch = 0", "patch = "),
    (ARRAYS, "data.path=HERE/ok.npz; model.name=resnet; model.width=-4", "width = -4", "width = "),
]
# The exchange, what is wrong with it, and words of the one problem.
EXCHANGES = [
    ("dilco", "", "parallel.exchange.name", "dilco", "did you mean 'diloco'?"),
    ("local", "evry=2", "unknown key parallel.exchange.evry", "did you mean 'every'?"),
    ("local", "every=0", "every = 0", "every is at least 1"),
    ("local", "every=-3", "every = -3"),
    ("local", "every=2.5", "every = 2.5", "integer"),
    ("local", "every=often", "every = ", "often"),
    ("local", "optimizer=mean", "optimizer = ", "averaged"),
    ("local", "algorithm=rign", "algorithm='rign'", "did you mean 'ring'?"),
    ("diloco", "every=0", "every = 0"),
    ("diloco", "lr=-1.0", "lr = -1.0"),
    ("diloco", "lr=inf", "lr = inf"),
    ("diloco", "lr=nan", "lr = nan"),
    ("diloco", "momentum=1.0", "momentum = 1.0", "below the latter"),
    ("diloco", "momentum=-0.1", "momentum = -0.1"),
    ("diloco", "nesterov=maybe", "nesterov = ", "true or false"),
    ("diloco", "outer=sgd", "outer='sgd'", "optax"),
    ("diloco", "algorithm=star", "algorithm='star'"),
    ("streaming", "fragments=0", "fragments = 0"),
    ("streaming", "every=10; fragments=4", "fragments = 4 with every = 10", "fragments = 2"),
    ("streaming", "every=4; delay=4", "delay = 4 with every = 4", "delay = 3"),
    ("streaming", "delay=-1", "delay = -1"),
    ("streaming", "blend=1.0", "blend = 1.0"),
    ("streaming", "order=random", "order = ", "strided"),
    ("easgd", "every=0", "every = 0"),
    ("easgd", "alpha=2.0", "alpha = 2.0"),
    ("easgd", "alpha=-0.1", "alpha = -0.1"),
    ("easgd", "beta=1.5", "beta = 1.5"),
    ("gossip", "graph=rign", "graph = 'rign'", "did you mean 'ring'?"),
    ("gossip", "graph=[[0.5,0.5],[0.9,0.1]]", "graph = ", "doubly stochastic"),
    ("gossip", "graph=[[1.5,-0.5],[-0.5,1.5]]", "graph = ", "none below 0"),
    ("gossip", "graph=[[1.0],[0.0,1.0]]", "graph = ", "square"),
    ("gossip", "graph=[[1.0]]", "a graph of 1 rows with data=2"),
    ("ensemble", "every=3", "unknown key parallel.exchange.every"),
    ("qsgd", "bits=3", "bits = 3"),
    ("qsgd", "block=12", "block = 12", "block = 16"),
    ("ternary", "block=0", "block = 0"),
    ("bf16", "smallest=0", "smallest = 0"),
    ("bf16", "bits=8", "unknown key parallel.exchange.bits"),
    ("sign", "smallest=1000000000", "compresses nothing", "smallest = "),
    ("sign", "whole=['*']", "compresses nothing"),
    ("topk", "share=0.0", "share = 0.0"),
    ("topk", "share=1.5", "share = 1.5"),
    ("randomk", "block=131072", "block = 131072"),
    ("sparse", "share=nan", "share = nan"),
    ("powersgd", "rank=0", "rank = 0"),
    ("powersgd", "rank=1000", "rank = 1000 and ", "not above the rows and columns of a matrix"),
    ("powersgd", "whole=['*']", "compresses nothing"),
    ("factors", "rank=-1", "rank = -1"),
    ("factors", "rank=5000", "compresses nothing between 2 replicas"),
]
JOBS += [
    (
        DECODER,
        "; ".join(f"parallel.exchange.{word}" for word in [f"name={name}", *filter(None, wrong.split("; "))]),
        *words,
    )
    for name, wrong, *words in EXCHANGES
]
JOBS += [
    (DECODER, "parallel.exchange.name=local; parallel.data=1; parallel.fsdp=4", "local every 20 steps with data=1"),
    (PIPE, "parallel.exchange.name=local", "exchange local every 20 steps with pipe=4"),
    (DECODER, "parallel.exchange.name=sign; train.offload=true", "offload with exchange sign"),
    (DECODER, "checkpoint.replicas=median", "checkpoint.replicas = ", "broadcast"),
]
RATES = "sweep.over.optimizer.learning_rate"
GRID = f"{RATES}=[1e-3, 3e-3]"
DRAWN = f"{RATES}={{ log_uniform = [1e-4, 1e-2] }}; sweep.members=4"
PBT = f"{DRAWN}; sweep.method=pbt"
# A sweep, what is wrong with it, and words of the one problem.
SWEEPS = [
    (GRID, "sweep.method=gird", "sweep.method", "did you mean 'grid'?"),
    (GRID, "sweep.ever=3", "unknown key sweep.ever", "did you mean 'every'?"),
    (
        GRID,
        "sweep.over.model.dim=[64, 128]",
        "sweep.over.model.dim",
        "arrays in the optimizer's state",
        "a job of its own",
    ),
    (GRID, "sweep.over.clip=[0.1]", "sweep.over.clip", "optimizer.clip"),
    (f"{RATES}={[*range(1, 90)]}", f"sweep.over.optimizer.clip={[*range(90)]}", "8010 combinations", "at most 4096"),
    (GRID, f"sweep.over.optimizer.clip=[{10**60}]", "sweep.over.optimizer.clip = ", "a list of numbers"),
    (GRID, "sweep.over.train.global_batch=[8, 16]", "sweep.over.train.global_batch", "a job of its own"),
    (GRID, "sweep.over.optimizer.name=['sgd', 'lion']", "sweep.over.optimizer.name", "a list of numbers"),
    (GRID, "sweep.over.optimizer.warmup=[1, 2]", "sweep.over.optimizer.warmup", "optimizer.learning_rate"),
    (GRID, "sweep.over.optimizer.weight_dacay=[0.1]", "weight_dacay", "did you mean 'optimizer.weight_decay'?"),
    (GRID, "sweep.over.optimizer.clip=[]", "sweep.over.optimizer.clip = []", "a list of numbers"),
    (GRID, "sweep.over.optimizer.clip=[1.0, nan]", "sweep.over.optimizer.clip = ", "a list of numbers"),
    (GRID, "sweep.over.optimizer.clip=1.0", "sweep.over.optimizer.clip = 1.0", "a list of numbers"),
    (GRID, "sweep.over.optimizer.clip=[1.0, -1.0]", "optimizer.clip = -1.0", "clip is at least 0"),
    (GRID, "sweep.over.optimizer.beta1=[0.9, 1.0]", "optimizer.beta1 = 1.0", "below the latter"),
    (GRID, "sweep.over.optimizer.weight_decay=[0.1]; optimizer.name=sgd", "sgd does not decay weights"),
    (GRID, "optimizer.reference_batch=64", "reference_batch = 64", "reference_batch = 0"),
    (GRID, "sweep.members=2", "sweep.members = 2", "leave sweep.members out"),
    (f"{RATES}=[1e-3]", "", "1 combinations", "two members or more"),
    (f"{RATES}={{ uniform = [1e-3, 1e-2] }}", "", "a grid is of lists", "random"),
    (f"{RATES}=[1e-3, 2e-3, 3e-3]", "", "3 members over data=2", "data=1"),
    (GRID, "parallel.data=4; parallel.fsdp=1", "2 members over data=4", "4 members"),
    (GRID, "parallel.exchange.name=local", "exchange local every 20 steps with [sweep]", "leave one"),
    (GRID, "sweep.every=7", "sweep.every = 7", "pbt"),
    (DRAWN, "sweep.method=random; sweep.members=0", "sweep.members = 0", "sweep.members = 8"),
    (DRAWN, "sweep.method=random; sweep.members=1", "sweep.members = 1", "two members or more"),
    (PBT, "sweep.members=1000000", "sweep.members = 1000000"),
    (PBT, "sweep.every=0", "sweep.every = 0", "every is at least 1"),
    (PBT, "sweep.share=0.6", "sweep.share = 0.6"),
    (PBT, "sweep.factors=[]", "factors = ()", "positive numbers"),
    (PBT, "sweep.factors=[0.8, -1.2]", "factors = (0.8, -1.2)", "positive numbers"),
    (PBT, f"{RATES}=[1e-3, 1e-2]", "within the range that they are drawn from"),
    (PBT, f"{RATES}={{ log_uniform = [0.0, 1.0] }}", "a logarithm is of a positive number"),
    (PBT, f"{RATES}={{ uniform = [1.0, 0.1] }}", "its lowest and its highest number"),
    (PBT, f"{RATES}={{ uniform = [0.1, 0.2], choice = [1.0] }}", "a draw is one of choice, uniform, log_uniform"),
]
JOBS += [(DECODER, "; ".join(filter(None, [base, wrong])), *words) for base, wrong, *words in SWEEPS]
JOBS += [(PIPE, GRID, "of 2 members", "with pipe=4")]


# every third in every run; CI runs all
@pytest.mark.parametrize(
    ("text", "wrong", "words"),
    [
        pytest.param(t, w, words, id=ascii(w), marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, (t, w, *words) in enumerate(JOBS)
    ],
)
def test_a_wrong_job_is_one_precise_problem(text, wrong, words, here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    with pytest.raises(JaxparError) as caught:
        checked(text.replace("HERE", str(here)), *wrong.replace("HERE", str(here)).split("; "))
    said(caught.value, *words)


@pytest.mark.spread(0)
@pytest.mark.parametrize("text", some([DECODER, OWN, PIPE, CUT], [DECODER, OWN]), ids=["decoder", "own", "pipe", "cut"])
def test_the_jobs_that_are_made_wrong_are_right(text):
    checked(text)


FIVE = {
    "spelling": (
        DECODER + '[optimizer]\nlearning_rate = "x"\n[trian]\n',
        ["train.step=3", "parallel.dtaa=2", "metrics.show_every=0"],
        ["train.step", "learning_rate", "[trian]", "parallel.dtaa", "show_every = 0"],
    ),
    "meaning": (
        DECODER,
        ["parallel.data=3", "parallel.zero=7", "model.heads=3", "train.loss=nexttoken", "data.path=nowhere.txt"],
        ["12 devices", "zero=7", "heads = 3", "nexttoken", "nowhere.txt"],
    ),
    "a table in a table": (
        PIPE + "[trian]\n",
        ["parallel.pipeline.schedul=1f1b", "parallel.pipeline.chunks=x", "parallel.zero=x", "train.steps=0"],
        ["parallel.pipeline.schedul", 'chunks = "x"', 'zero = "x"', "steps = 0", "[trian]"],
    ),
    "a pipeline": (
        PIPE.replace("steps", "global_batch = 33\nsteps"),
        ["train.accumulate=2", "parallel.pipeline.schedule=gpip", "train.loss=nexttoken", "data.path=nowhere.txt"],
        ["accumulate = 2", "global_batch = 33", "'gpip'", "nexttoken", "nowhere.txt"],
    ),
    "one table": (
        DECODER,
        ["train.steps=0", "train.seed=-1", "train.accumulate=0", "train.global_batch=0", "train.eval_every=-1"],
        ["steps = 0", "seed = -1", "accumulate = 0", "global_batch = 0", "eval_every = -1"],
    ),
}


@pytest.mark.parametrize(("text", "wrong", "words"), FIVE.values(), ids=FIVE)
def test_five_mistakes_are_reported_at_once(text, wrong, words):
    with pytest.raises(JaxparError) as caught:
        checked(text, *wrong)
    said(caught.value, *words, problems=5)


def test_one_mistake_is_one_problem_however_many_parameters_have_it():
    with pytest.raises(JaxparError) as caught:
        checked(DECODER, "model.vocab=257", "model.layers=3")
    said(caught.value, "257", "tensor=1", "{'vocab': None}")


@pytest.mark.parametrize(
    ("section", "wrong"),
    some(
        FIXED := [
            ("train", "global_batch=33"), ("train", "accumulate=3"), ("train", "steps=0"), ("model", "dim=33"),
            ("model", "dim=20"), ("model", "kv_heads=3"), ("model", "vocab=100"), ("parallel", "tensor=3"),
            ("parallel", "zero=5"), ("optimizer", "beta2=1.5"), ("data", "held_out=0.9"),
        ],
        FIXED[2::3],
    ),
)  # fmt: skip
def test_the_fix_works(section, wrong):
    with pytest.raises(JaxparError) as caught:
        checked(DECODER, f"{section}.{wrong}")
    key, value = re.search(r"(\w+) ?= ?'?([\w.]+)", caught.value.problems[0].fix).groups()
    checked(DECODER, f"{section}.{wrong}", f"{section}.{key}={value}")


def test_a_fix_in_the_model_names_keys_that_the_model_has():
    with pytest.raises(JaxparError) as caught:
        checked(DECODER, "model.hidden=33")
    keys = re.findall(r"(\w+)=\d+ in the model", str(caught.value))
    assert all(key in DecoderConfig.__dataclass_fields__ for key in keys), str(caught.value)


def test_a_job_with_a_windows_byte_order_mark_is_read(here):
    assert load(here / "windows.toml").train.steps == 40


@pytest.mark.parametrize("value", ["5\nx = 3", "[1,"])
def test_an_override_is_one_value(value):
    with pytest.raises(JaxparError) as caught:
        loads(DECODER, [f"train.steps={value}"])
    said(caught.value, "train.steps", "integer")


@cache
def layout(**sizes):
    return jp.compose(Net, jp.Parallel(**(sizes or {"data": 8})))


ADAM = optax.adam(1e-3)


@cache
def state(optimizer=ADAM, **sizes):
    """A state that is never given up: the steps that see it refuse something else first."""
    return jp.init_state(layout(**sizes), optimizer)


def compose(model=Net, devices=None, **parallel):
    return jp.compose(model, jp.Parallel(**(parallel or {"data": 8})), devices)


def step(batch=BATCH, loss=jp.classification_loss, given=None, model=Net, **numerics):
    where = layout() if model is Net else compose(model)
    made = given() if given else state() if model is Net else jp.init_state(where, ADAM)
    return jp.train_step(where, loss, ADAM, **numerics)(made, batch)


def traced(**parallel):
    one = jp.train_step(compose(**parallel), jp.classification_loss, ADAM)
    return one.lower(one.abstract(), BATCH)


def updating(optimizer):
    one = jp.train_step(layout(), jp.classification_loss, optimizer)
    return one.lower(one.abstract(), BATCH)


def twice(then=lambda one, made: one(made, BATCH)):
    made, one = jp.init_state(layout(), ADAM), jp.train_step(layout(), jp.classification_loss, ADAM)
    one(made, BATCH)
    return then(one, made)


ONE = np.zeros((1, 64), np.float32)
PARAMS = {"params": {"Dense_0": {"kernel": np.zeros((64, 10), np.float32)}}}
VALUES = {
    # the declaration
    "an axis misspelt": (lambda: compose(dta=8), "Parallel(dta=8)", "did you mean 'data'?"),
    "an axis by the name of other libraries": (lambda: compose(tp=8), "Parallel(tp=8)", "tensor=8"),
    "a rule to an axis of other libraries": (
        lambda: compose(data=8, rules={"mlp": "mp"}),
        "rule mlp -> 'mp'",
        "did you mean 'tensor'?",
    ),
    "a number without its axis": (lambda: jp.Parallel(8), "Parallel(8)", "pipe=8"),
    "a pipeline misspelt": (lambda: jp.Pipeline(schedul="1f1b"), "schedul='1f1b'", "did you mean 'schedule'?"),
    "data as text": (lambda: compose(data="8"), "data='8'", "data=8"),
    "fsdp as truth": (lambda: compose(fsdp=True), "fsdp=True", "positive whole number"),
    "zero as float": (lambda: compose(fsdp=8, zero=2.0), "zero=2.0", "zero="),
    "context as text": (lambda: compose(data=4, context="2"), "context='2'", "context=2"),
    "context as a half": (lambda: compose(data=4, context=0.5), "context=0.5", "positive whole number"),
    "sequence as text": (lambda: compose(data=4, tensor=2, sequence="no"), "sequence='no'", "True"),
    "zero=3 over an inferred 1": (lambda: compose(data=8, fsdp=-1, zero=3), "zero=3 with fsdp=1", "fsdp=2"),
    "-1 and what does not divide": (lambda: compose(data=-1, fsdp=3), "fsdp=3", "3 does not divide", "divisor of 8"),
    "replicate_above as text": (lambda: compose(fsdp=8, replicate_above="4MiB"), "'4MiB'", "bytes"),
    "rules as a list": (lambda: compose(data=4, tensor=2, rules=[("mlp", "tensor")]), "rules=", '{"mlp": "tensor"}'),
    "rules as nothing": (lambda: compose(data=8, rules=None), "rules=None", "rules="),
    "a rule to a number": (lambda: compose(data=4, tensor=2, rules={"mlp": 5}), "mlp", "5"),
    "a rule for no name": (lambda: traced(data=8, rules={"foo": "data"}), "'foo'", "one of"),
    "paths as a number": (lambda: compose(data=4, tensor=2, paths=5), "paths=5", "paths="),
    "a path to one name": (lambda: compose(data=4, tensor=2, paths={"a/kernel": "embed"}), "'embed'", "a/kernel"),
    "a path to nothing": (lambda: compose(data=4, tensor=2, paths={"a/kernl": ("embed",)}), "did you mean 'a/kernel'?"),
    "a path that is no regex": (lambda: compose(data=4, tensor=2, paths={"[": ("embed",)}), "'['", "regular"),
    "a path that is a glob": (lambda: compose(data=4, tensor=2, paths={"*/kernel": ("mlp",)}), "*/kernel", "regular"),
    "a path with a dim misspelt": (
        lambda: compose(data=4, tensor=2, paths={"a/kernel": (None, "mpl")}),
        "a dim 'mpl'",
        "did you mean 'mlp'?",
    ),
    "a path with a dim of no rule": (
        lambda: compose(data=4, tensor=2, paths={"a/kernel": (None, "qqq")}),
        "a dim 'qqq'",
        'rules={"qqq": "tensor"}',
    ),
    # data
    "a file for a source": (lambda: jp.Data(source="my/corpus.txt"), 'source = "text", path = "my/corpus.txt"'),
    "arrays for a source": (lambda: jp.Data(source="mine.npz"), 'source = "arrays", path = "mine.npz"'),
    "no source": (lambda: jp.Data(source=None), "data.source = None", "one of: arrays"),
    "seq as text": (lambda: jp.Data(seq="64"), "data.seq = '64'", "seq is a number"),
    "a name without its object": (lambda: jp.open_data(jp.Data(source="mine:batches")), "mine:batches", "named="),
    # the model
    "no model": (lambda: compose(None), "model=None", "lambda rngs"),
    "a model made": (lambda: compose(Net(rngs=nnx.Rngs(0))), "Net that is built already", "lambda rngs: Net"),
    "a Linen module": (lambda: compose(Lin()), "Lin", "jp.from_linen(Lin"),
    "a Linen class": (lambda: compose(Lin), "Lin", "jp.from_linen(Lin"),
    "a factory of Linen": (lambda: compose(lambda rngs: Lin()), "Lin", "jp.from_linen"),
    "statistics of groups": (lambda: step(model=misuse.GroupedNorm), "axis_index_groups=[[0, 1]]", "whole batch"),
    "an optimizer split otherwise": (lambda: compose(misuse.OptimizerSplit), "optimizer_sharding=('mlp',", "zero=1"),
    "a factory of nothing": (lambda: compose(misuse.returns_none), "returned NoneType", "lambda rngs: MyNet"),
    "a factory of text": (lambda: compose(lambda rngs: "Net"), "str", "lambda rngs: MyNet"),
    "a factory of no arguments": (lambda: compose(lambda: Net(rngs=nnx.Rngs(0))), "rngs", "lambda rngs: MyNet"),
    "a factory with others": (lambda: compose(misuse.NeedsSize), "it also needs size", "lambda rngs"),
    "a factory that raises": (lambda: compose(misuse.RaisesWhenMade), "no such weights", "misuse.py"),
    "a layout as model": (lambda: compose(layout()), "<layout: Net", "lambda rngs"),
    "linen of a class": (lambda: jp.from_linen(Lin, ONE), "Lin", "jp.from_linen("),
    "linen of NNX": (lambda: jp.from_linen(Net, ONE), "Net", "NNX"),
    "linen of nothing": (lambda: jp.from_linen(Lin()), "Lin", "jnp.zeros([1, ...])"),
    "linen of a shape": (lambda: jp.from_linen(Lin(), (1, 64)), "(1, 64)", "jnp.zeros"),
    "linen of a module that is bound": (
        lambda: jp.from_linen(Lin().bind(Lin().init(jax.random.key(0), ONE)), ONE),
        "Lin(...).bind(...)",
        "jp.from_linen(Lin(...), inputs)",
    ),
    "a key before the inputs of linen": (
        lambda: compose(jp.from_linen(Lin(), jax.random.key(0), ONE)),
        "Lin",
        "__call__",
    ),
    "variables for inputs of linen": (lambda: compose(jp.from_linen(Lin(), PARAMS)), "Lin", "__call__"),
    "parameters for a model": (lambda: compose(PARAMS), "model={'params'", "lambda rngs"),
    "a model split": (lambda: compose(nnx.split(Net(rngs=nnx.Rngs(0)))), "model=(GraphDef", "lambda rngs"),
    "linen called otherwise": (lambda: jp.from_linen(Lin(), ONE, train=True), "'train'", "__call__"),
    # devices
    "a dict for a Parallel": (lambda: jp.compose(Net, {"data": 8}), "{'data': 8}", "jp.Parallel(data=8)"),
    "no devices": (lambda: compose(devices=0, data=-1), "devices=0", "devices=8"),
    "an empty list of devices": (lambda: compose(devices=[]), "devices=[]", "jax.devices()"),
    "devices as text": (lambda: compose(devices="8"), "devices='8'", "jax.devices()"),
    "one device": (lambda: compose(devices=jax.devices()[0]), "device"),
    "a device twice": (lambda: compose(devices=[jax.devices()[0]] * 8), "devices=", "jax.devices()"),
    "too few devices": (lambda: compose(devices=jax.devices()[:3]), "data=8", "3 are visible", "data=3"),
    "simulated as text": (lambda: jp.simulate("8"), "simulate('8')", "simulate(8)"),
    "simulated none": (lambda: jp.simulate(0), "simulate(0)", "positive"),
    "simulated too late": (lambda: jp.simulate(4), "simulate(4)", "first thing"),
    # state and step
    "an optimizer not called": (lambda: jp.init_state(layout(), optax.adam), "adam", "optax.adam(3e-4)"),
    "an optimizer of NNX": (
        lambda: jp.init_state(layout(), nnx.Optimizer(Net(rngs=nnx.Rngs(0)), ADAM, wrt=nnx.Param)),
        "optimizer=Optimizer(",
        "optax.adamw(3e-4)",
    ),
    "a learning rate for an optimizer": (lambda: jp.init_state(layout(), 1e-3), "optimizer=0.001", "optax.adamw(3e-4)"),
    "labels of optimizers for other parameters": (
        lambda: jp.init_state(layout(), optax.multi_transform({"a": ADAM}, {"x": "a"})),
        "the optimizer's init",
        "optax",
    ),
    "an optimizer for a loss": (
        lambda: jp.train_step(layout(), ADAM, jp.classification_loss),
        "loss=Gradient",
        "(model, batch)",
    ),
    "labels without an optimizer": (
        lambda: jp.init_state(layout(), optax.multi_transform({"adam": ADAM}, {"a": "adam", "b": "adm"})),
        "labels: ['adam', 'adm'] Transforms keys: ['adam']",
        "optax",
    ),
    "a schedule with an if": (
        lambda: updating(optax.sgd(lambda step: 0.1 if step < 10 else 0.01)),
        "test_wrong_input.py",
        "the optimizer's update",
        "jnp.where",
    ),
    "a schedule of no step": (lambda: updating(optax.sgd(lambda: 0.1)), "the optimizer's update", "takes 0"),
    "a schedule that is text": (lambda: updating(optax.sgd(lambda step: "0.1")), "the optimizer's update", "rate"),
    "updates of other shapes": (
        lambda: updating(misuse.chain(lambda gradients, state: (jax.tree.map(jnp.sum, gradients), state))),
        "params['a']['bias'] is of shape [], the parameter is of [16]",
        "one update for each parameter",
    ),
    "an update that is None": (
        lambda: updating(misuse.chain(lambda gradients, state: (jax.tree.map(lambda _: None, gradients), state))),
        "the optimizer makes no update of params['a']['bias']",
        "zeros_like",
    ),
    "a state of an optimizer that grows": (
        lambda: updating(misuse.chain(lambda gradients, state: (gradients, (*state, jnp.zeros(2))))),
        "the optimizer's state[0] is not there before an update and float32[2] after it",
        "in its init",
    ),
    "a list of optimizers": (lambda: jp.init_state(layout(), [ADAM]), "optimizer=[", "optax.adamw(3e-4)"),
    "arguments swapped": (lambda: jp.init_state(ADAM, layout()), "layout=", "jp.compose"),
    "a seed as text": (lambda: jp.init_state(layout(), ADAM, seed="0"), "seed='0'", "seed=0"),
    "a seed of 65 bits": (lambda: jp.init_state(layout(), ADAM, seed=2**64), "seed=18446744073709551616", "seed=0"),
    "offload as text": (lambda: jp.init_state(layout(), ADAM, offload="yes"), "offload='yes'", "offload=True"),
    "a layout on no devices": (
        lambda: jp.init_state(compose(devices=16, data=16), ADAM),
        "without devices",
        "compose(",
    ),
    "a remat unknown": (
        lambda: jp.train_step(layout(), jp.classification_loss, ADAM, remat="ful"),
        "remat='ful'",
        "'full'",
    ),
    "a remat as a list": (
        lambda: jp.train_step(layout(), jp.classification_loss, ADAM, remat=["dots"]),
        "['dots']",
        "dots",
    ),
    "a precision as dtype": (
        lambda: jp.train_step(layout(), jp.classification_loss, ADAM, precision=jnp.float16),
        "float16",
        "bf16",
    ),
    "accumulate as float": (
        lambda: jp.train_step(layout(), jp.classification_loss, ADAM, accumulate=2.0),
        "accumulate=2.0",
        "whole",
    ),
    "a setting unknown": (
        lambda: jp.train_step(layout(), jp.classification_loss, ADAM, acumulate=2),
        "acumulate=2",
        "'accumulate'",
    ),
    "no loss": (lambda: jp.train_step(layout(), None, ADAM), "loss=None", "(model, batch)"),
    "a loss by name": (lambda: jp.train_step(layout(), "classify", ADAM), "loss='classify'", "(model, batch)"),
    "no layout": (lambda: jp.train_step(None, jp.classification_loss, ADAM), "layout=None", "jp.compose"),
    "constrain of too few names": (lambda: jp.constrain(jnp.ones((2, 3)), "batch"), "[2, 3]", "'batch'"),
    # batches
    "no batch": (lambda: step(None), "None", '"inputs"'),
    "a batch as a tuple": (lambda: step((X, Y)), "a tuple", '"inputs"'),
    "a batch as a named tuple": (lambda: step(misuse.Pair(X, Y)), "a Pair", "batch._asdict()"),
    "a batch as a dataclass": (lambda: step(misuse.Example(X, Y)), "a Example", "vars(batch)"),
    "a tuple to inspect": (
        lambda: jp.inspect(jp.train_step(layout(), jp.classification_loss, ADAM), (X, Y)),
        "a tuple",
        '"inputs"',
    ),
    "a dict in the batch": (lambda: step({"seen": BATCH}), "a dict of inputs, labels", "flatten_dict(batch"),
    "a dict in the batch to inspect": (
        lambda: jp.inspect(jp.train_step(layout(), jp.classification_loss, ADAM), {"seen": BATCH}),
        "a dict of inputs, labels",
        "flatten_dict(batch",
    ),
    "random keys in the batch": (
        lambda: step({**BATCH, "keys": jax.random.split(jax.random.key(0), 16)}),
        "random keys",
        "(model, batch, key)",
    ),
    "a whole number of 64 bits in the batch": (
        lambda: step({**BATCH, "user": np.full((16,), 2**40)}),
        "user in the batch has 1099511627776",
        "int32",
    ),
    "a plan of a dict in a dict": (
        lambda: jp.plan(jp.train_step(layout(), jp.classification_loss, ADAM), {"seen": BATCH}, devices=8),
        "{'seen': {'inputs': float32[16, 64], 'labels': int32[16]}}",
        "a dict of arrays",
    ),
    "no batch to inspect": (
        lambda: jp.inspect(jp.train_step(layout(), jp.classification_loss, ADAM)),
        "without a batch",
        "jax.",
    ),
    "an empty batch": (lambda: step({}), "{}", '"inputs"'),
    "a batch of no rows": (lambda: step({"inputs": X[:0], "labels": Y[:0]}), "[0, 64]", "global batch of 8"),
    "15 rows": (lambda: step({"inputs": X[:15], "labels": Y[:15]}), "[15, 64]", "global batch of 16"),
    "a scalar in the batch": (lambda: step({**BATCH, "epoch": 3}), "epoch in the batch is one int", "np.full(examples"),
    "a step inside of jit": (
        lambda: jax.jit(lambda given: step(given=lambda: given))(state()),
        "a step inside of jax.jit",
        "without jax.jit",
    ),
    "nothing in the batch": (lambda: step({**BATCH, "labels": None}), "labels", "numbers"),
    "objects in the batch": (lambda: step({**BATCH, "inputs": np.array([object()] * 16)}), "inputs", "object"),
    "text in the batch": (lambda: step({**BATCH, "labels": np.array(["a"] * 16)}), "labels", "<U1"),
    "ragged rows": (lambda: step({**BATCH, "inputs": [[1.0], [1.0, 2.0]] * 8}), "inputs", "inhomogeneous"),
    "an array missing": (lambda: step({"inputs": X}), "'labels'", "inputs float32[16, 64]"),
    "inputs too narrow": (lambda: step({**BATCH, "inputs": X[:, :63]}), "63", "64"),
    "labels of another length": (lambda: step({**BATCH, "labels": Y[:8]}), "labels", "8"),
    "labels one-hot": (lambda: step({**BATCH, "labels": np.eye(10, dtype=np.float32)[Y]}), "[16, 10]", "labels"),
    "labels [n, 1]": (lambda: step({**BATCH, "labels": Y[:, None]}), "labels", "[16, 1]"),
    "a mask [n, 1]": (lambda: step({**BATCH, "mask": np.ones((16, 1), np.float32)}), "mask", "[16, 1]"),
    # losses
    "a vector": (lambda: step(loss=misuse.vector), "float32[16]", "jnp.sum(losses)"),
    "a mean, accumulated": (lambda: step(loss=misuse.mean, accumulate=2), "accumulate=2", "(sum, count)"),
    "a loss and logits": (lambda: step(loss=misuse.mean_and_logits), "float32[16, 10]", "jnp.sum(losses)"),
    "a mean and metrics": (
        lambda: step(loss=misuse.mean_and_metrics),
        "'accuracy': 'float32[]'",
        '{"loss": (jnp.sum(losses), losses.size), "accuracy": (sum, count)}',
    ),
    "a model that is not called": (lambda: step(loss=misuse.not_called), "Net and its loss", "labels int32[16]"),
    "a loss that never reads its model": (
        lambda: step(loss=misuse.without_model),
        "reads no parameter of Net",
        "model(batch",
    ),
    "a loss with its arguments swapped": (lambda: step(loss=misuse.swapped), "misuse.py", "labels int32[16]"),
    "a model applied as in Linen": (
        lambda: step(loss=misuse.applied, model=jp.from_linen(Lin(), ONE)),
        "no attribute 'apply'",
        "misuse.py",
    ),
    "a loss of four arguments": (lambda: step(loss=misuse.of_four), "missing", "labels int32[16]"),
    "dropout without a key": (lambda: step(model=misuse.Dropped), "no `rngs`", "Dropped"),
    "a spec with an axis that is none": (lambda: step(model=misuse.WrongSpec), "'dta'", "is no axis of the mesh"),
    "state that grows": (lambda: step(model=misuse.KeepsItsInputs), "last of [16, 64]", "made as [64]"),
    "a mean over an axis of pmap": (lambda: step(model=misuse.Averaging), "batch", "misuse.py"),
    "an array of numpy in a model": (lambda: step(model=misuse.InNumpy), "numpy.ndarray", "misuse.py"),
    "labels as numbers with a point": (lambda: step({**BATCH, "labels": Y.astype(np.float32)}), "labels float32[16]"),
    "a dict without loss": (lambda: step(loss=misuse.without_loss), "lss", '"loss"'),
    "a loss that raises": (lambda: step(loss=misuse.raises), "no luck", "misuse.py"),
    "a mean over replicas": (lambda: step(loss=misuse.averaged), "unbound axis name: batch", "no pmean"),
    "a loss of a wrong key": (lambda: step(loss=misuse.wrong_key), "'label'", "misuse.py"),
    "a loss with an if": (lambda: step(loss=misuse.python_if), "boolean", "misuse.py"),
    "a loss without a gradient": (lambda: step(loss=misuse.whole_number), "int32", "float32"),
    "a model that raises": (lambda: step(model=misuse.RaisesWhenCalled), "to do", "misuse.py"),
    # states
    "no state": (lambda: step(given=lambda: {"params": 1}), "dict", "jp.init_state"),
    "a state of another layout": (
        lambda: step(given=lambda: state(data=2, fsdp=2, tensor=2)),
        "layout",
        "jp.init_state",
    ),
    "a state that is not offloaded": (
        lambda: step(offload=True),
        "is in device memory",
        "jp.init_state(layout, optimizer, offload=True)",
    ),
    "a state of another optimizer": (lambda: step(given=lambda: state(optax.sgd(0.1))), "optimizer", "jp.init_state"),
    "a state of another model": (
        lambda: step(given=lambda: jp.init_state(compose(lambda rngs: Net(32, rngs=rngs)), ADAM)),
        "[32]",
        "[16]",
    ),
    "a state used twice": (twice, "state", "state, metrics = step(state, batch)"),
    "a state fitted after its step": (
        lambda: twice(lambda one, made: jp.fit(one, lambda: [BATCH], state=made, steps=1, batch=16)),
        "state",
        "state, metrics = step(state, batch)",
    ),
    "a state saved after its step": (
        lambda: twice(lambda one, made: jp.save("nowhere", made)),
        "state",
        "state, metrics = step(state, batch)",
    ),
    "a state evaluated after its step": (
        lambda: twice(lambda one, made: one.evaluate(made, BATCH)),
        "state",
        "state, metrics = step(state, batch)",
    ),
}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(call, words, id=name, marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, (name, (call, *words)) in enumerate(VALUES.items())
    ],
)
def test_a_wrong_value_is_one_precise_problem(call, words):
    with pytest.raises(JaxparError) as caught:
        call()
    said(caught.value, *words)


def test_a_refused_batch_leaves_the_state_alone():
    made, one = jp.init_state(layout(), ADAM), jp.train_step(layout(), jp.classification_loss, ADAM)
    with pytest.raises(JaxparError):
        one(made, {"inputs": X[:15], "labels": Y[:15]})
    assert np.isfinite(one(made, BATCH)[1]["loss"])


def test_a_label_that_is_none_has_no_number_for_a_loss():
    assert jnp.isnan(cross_entropy(jnp.zeros((3, 4)), jnp.array([3, 4, -1]))).tolist() == [False, True, True]


@pytest.fixture(scope="module")
def trained(here):
    """The folder of a run of two steps."""
    job = loads(ARRAYS, [f"data.path={here}/ok.npz", "model.dim=8", "train.steps=2", f"run.dir={here}/run"])
    run.train(job, stream=io.StringIO())
    return here / "run"


def _last(folder):
    return max((folder / "checkpoints").iterdir())


def _emptied(folder):
    for path in _last(folder).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


RUNS = {
    "another width": (None, ["model.dim=16"], "8] in the checkpoint", "16] in the job", "run.dir"),
    "another optimizer": (None, ["optimizer.name=sgd"], "in the checkpoint", "run.dir"),
    "other data": (None, ["data.path=HERE/other.npz"], "was trained on data", "run.dir"),
    "resume=never": (None, ["run.resume=never"], "checkpoints up to step 2", "run.resume = 'auto'"),
    "resume=must": (
        lambda folder: shutil.rmtree(folder / "checkpoints"),
        ["run.resume=must"],
        "no checkpoint",
        "'auto'",
    ),
    "run.json": (lambda folder: (folder / "run.json").write_text("{"), [], "run.json"),
    "run.json of another kind": (lambda folder: (folder / "run.json").write_text("[]"), [], "run.json"),
    "metrics.jsonl": (lambda folder: (folder / "metrics.jsonl").write_text("{{\n"), [], "metrics.jsonl"),
    "a checkpoint emptied": (_emptied, [], "checkpoints", "000002"),
    "a file for checkpoints": (
        lambda folder: (shutil.rmtree(folder / "checkpoints"), (folder / "checkpoints").write_text("")),
        [],
        "checkpoints",
    ),
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.xdist_group("runs")
@pytest.mark.parametrize(
    ("damage", "overrides", "words"), [pytest.param(d, o, words, id=k) for k, (d, o, *words) in RUNS.items()]
)
def test_a_run_that_cannot_go_on_says_why(damage, overrides, words, trained, here, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    np.savez(here / "other.npz", inputs=X, labels=Y)
    if damage:
        damage(folder)
    wrong = [text.replace("HERE", str(here)) for text in overrides]
    job = loads(ARRAYS, [f"data.path={here}/ok.npz", "model.dim=8", "train.steps=4", f"run.dir={folder}", *wrong])
    with pytest.raises(JaxparError) as caught:
        run.train(job, stream=io.StringIO())
    said(caught.value, *words)


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300], ids=["a file", "below a file", "too long"])
def test_a_run_folder_that_cannot_be_made_is_refused(place, here):
    job = loads(ARRAYS, [f"data.path={here}/ok.npz", "train.steps=1", f"run.dir={here / place}"])
    with pytest.raises(JaxparError) as caught:
        run.train(job, stream=io.StringIO())
    said(caught.value, "run", str(here), "run.dir = ")


@pytest.mark.xdist_group("runs")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["trained on arrays", "data.source = 'text'"]),
        ({"tokens": 0}, ["tokens 0", "--tokens"]),
        ({"temperature": float("nan")}, ["temperature = nan", "temperature = 0.8"]),
        ({"seed": 2**70}, ["seed", "1180591620717411303424"]),
    ],
    ids=["no text", "no tokens", "nan", "seed"],
)
def test_a_sample_that_makes_no_sense_is_refused(settings, words, trained):
    drawn = {key: value for key, value in settings.items() if key != "tokens"}
    with pytest.raises(JaxparError) as caught:
        sample(trained, ["a"], SamplingRequest(tokens=settings.get("tokens", 3), sampling=Sampling(**drawn)))
    said(caught.value, *words)


# What is typed (HERE is the folder), the status, and words on stderr.
COMMANDS = [
    ("", 2, "VERB"),
    ("trian HERE/ok.toml", 2, "no verb 'trian'", "train"),
    ("train", 1, "without a job", "jaxpar train configs/quickstart.toml"),
    ("check HERE/ok.toml --steps=5", 2, "--steps"),
    ("check HERE/none.toml", 1, "none.toml", "No such file"),
    ("check HERE", 1, "Is a directory", "TOML"),
    ("check HERE/bad.toml", 1, "line 1", "[section]"),
    ("check HERE/binary.toml", 1, "binary.toml", "utf-8"),
    ("check HERE/ok.toml train.step=5", 1, "error: unknown key train.step", "rule:", "fix:  did you mean 'steps'?"),
    (
        "check HERE/ok.toml train.step=5 run.resum=must",
        1,
        "problem: unknown key train.step",
        "problem: unknown key run.resum",
    ),
    ("check HERE/own.toml train.steps=0", 1, "error: train.steps = 0"),  # and nothing that only follows from it
    ("check HERE/own.toml data.sorce=digits", 1, "error: unknown key data.sorce"),
    ("check HERE/ok.toml data.path=\udcff data.source=text", 1, "data.path", "fix:"),
    ("check HERE/ok.toml --json HERE/none/x.json", 1, "none/x.json"),
    ("sample HERE/none", 1, "holds no job.toml", "jaxpar train"),
    ("sample HERE/ok.toml", 1, "holds no job.toml", "jaxpar train"),
    ("sample HERE --tokens many", 2, "--tokens", "'many'"),
    ("checkpoint", 2, "ls|show|verify|diff|export"),
    ("checkpoint ls HERE/none", 1, "none is no folder", "runs/mine"),
    ("checkpoint verify HERE", 1, "no checkpoint in", "train it first"),
    ("checkpoint show HERE/ok.toml", 1, "no checkpoint in", "train it first"),
    ("checkpoint diff HERE HERE/ok.toml", 1, "no checkpoint in"),
    ("checkpoint export HERE --to HERE/none", 1, "no checkpoint in"),
    ("checkpoint verify HERE --step last", 2, "--step", "'last'"),
    ("sweep HERE/ok.toml", 1, "without [sweep.over]", "sweep.over.optimizer.learning_rate="),
    ("plan HERE/ok.toml --devices 8 sweep.over.optimizer.learning_rate=[1e-3,3e-3]", 1, "a job with [sweep]"),
    ("exchange", 2, "compare|collective"),
    ("exchange collective trie", 1, "collective 'trie'", "did you mean 'tree'?"),
    ("exchange collective tree --devices 0", 1, "--devices 0"),
    ("exchange compare HERE/ok.toml", 2, "--methods"),
    ("exchange compare HERE/ok.toml --methods snyc", 1, "method 'snyc'", "did you mean 'sync'?"),
    ("exchange compare HERE/ok.toml --methods sync --delays slow", 1, "delays 'slow'"),
    ("exchange compare HERE/ok.toml --methods sync --compute 0", 1, "compute = 0.0"),
    ("exchange compare HERE/ok.toml --methods sync --between 10", 1, "'10' has no unit"),
    ("exchange compare HERE/ok.toml --methods sync sweep.over.optimizer.clip=[1.0,2.0]", 1, "a job with [sweep]"),
    ("exchange compare HERE/ok.toml --methods sync --html HERE", 1, "--html", "a folder that exists"),
    ("exchange compare HERE/ok.toml --methods backup:1", 1, "1 backups of 2 workers", "a larger parallel.data"),
]


@pytest.mark.parametrize(
    ("typed", "status", "words"), [pytest.param(t, s, words, id=ascii(t)) for t, s, *words in COMMANDS]
)
def test_a_wrong_command_says_so_and_has_a_status(typed, status, words, here, capsys):
    try:
        found = main(typed.replace("HERE", str(here)).split())
    except SystemExit as leaving:  # how argparse leaves
        found = leaving.code
    text = capsys.readouterr().err
    assert found == status, text
    assert not [word for word in words if word not in text], text
    assert "Traceback" not in text


def test_json_has_every_problem(here, tmp_path):
    main(["check", str(here / "ok.toml"), "train.step=5", "run.resum=must", "--json", str(tmp_path / "x.json")])
    problems = json.loads((tmp_path / "x.json").read_text())["problems"]
    assert [sorted(problem) for problem in problems] == [["fix", "got", "rule"]] * 2


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("verb", "wrong", "words"),
    [
        pytest.param("train", "run.dir=HERE/file/below", ["file/below", "fix:"], marks=pytest.mark.slow),
        pytest.param("check", "model.name=leaving:Net", ["leaving", "fix:"], marks=pytest.mark.slow),
    ],
    ids=["train", "check"],
)
def test_a_process_ends_with_status_1_and_no_traceback(verb, wrong, words, here):
    typed = [verb, str(here / "ok.toml"), wrong.replace("HERE", str(here)), "train.steps=1"]
    typed += ["data.source=text", f"data.path={here}/ok.txt"] if verb == "train" else ["train.loss=next_token"]
    ended = subprocess.run(
        [sys.executable, "-m", "jaxpar", *typed],
        cwd=here,
        env=os.environ | {"JAXPAR_NO_HUGE_PAGES": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [word for word in words if word not in ended.stderr], ended.stderr


def test_the_table_is_not_smaller_than_promised():
    assert len(JOBS) + len(VALUES) + len(RUNS) + len(COMMANDS) >= 200
