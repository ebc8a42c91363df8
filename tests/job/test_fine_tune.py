"""A folder of Hugging Face's is tuned as it comes: named, adapted, resumed, exported, and read by transformers."""

import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairwise import some
from test_huggingface import LLAMA, born
from tokenizing import llama3

from jaxpar.cli.main import main
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check, resolve
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.plan_traced import state_recipe
from jaxpar.models.decoder import Decoder
from jaxpar.models.huggingface.folder import check_links, end_ids
from jaxpar.models.huggingface.safetensors import entries
from jaxpar.models.huggingface.weights import export, load

# as published folders have it: keys that change no logit, some of which older versions of transformers wrote
BOOKKEEPING = {
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "_name_or_path": "x", "torchscript": False, "top_k": 50,
    "temperature": 0.6, "is_decoder": False, "num_beams": 1, "transformers_version": "4.41.0", "unsloth_version": "1",
}  # fmt: skip
TOKENIZER = {
    "tokenizer.json": {"version": "1.0"}, "tokenizer_config.json": {"chat_template": "{{ messages }}"},
    "special_tokens_map.json": {"bos_token": "<s>"}, "generation_config.json": {"eos_token_id": [2, 3]},
}  # fmt: skip
JOB = """
[run]
dir = "{to}"
[model]
name = "{folder}"
[data]
source = "arrays"
path = "{data}"
[train]
steps = 6
global_batch = 8
{train}
[optimizer]
learning_rate = 0.02
decay = "constant"
[parallel]
data = 2
fsdp = 2
tensor = 2
"""
ADAPTERS = 'adapters = {rank = 1, alpha = 4.0, paths = ["blocks/attention/*", "blocks/mlp/up"]}'
FEW = pytest.mark.filterwarnings("ignore:.*each device computes")  # rank 1 of a width of 16


@pytest.fixture
def folder(tmp_path):
    to = tmp_path / "my-llama"
    export(born(LLAMA), LLAMA, to)
    (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | BOOKKEEPING))
    for name, content in TOKENIZER.items():
        (to / name).write_text(json.dumps(content))
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocab, (64, 13)).astype(np.int32)
    np.savez(tmp_path / "data.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    return to


def job(folder: Path, name: str, *overrides: str, train: str = ADAPTERS):
    text = JOB.format(to=folder.parent / name, folder=folder, data=folder.parent / "data.npz", train=train)
    return loads(text, overrides)


def trained(*args, **kwargs):
    said = io.StringIO()
    return run.train(job(*args, **kwargs), stream=said), said.getvalue()


def exported(folder: Path, name: str) -> Path:
    to = folder.parent / f"{name}-out"
    arguments = ["checkpoint", "export", str(folder.parent / name), "--format", "safetensors", "--to", str(to)]
    assert main(arguments) == 0
    return to


def forward(model):
    """Returns tokens to logits of a loaded model."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(model.settings, rngs=nnx.Rngs(0))))
    flat = [
        (path, leaf.replace(jnp.asarray(model.params["/".join(path)][...]))) for path, leaf in nnx.to_flat_state(state)
    ]
    return jax.jit(nnx.merge(graph, nnx.from_flat_state(flat)).__call__)


def greedy(logits, count: int) -> list[int]:
    """Returns the tokens that are added, each by the logits of all before it."""
    tokens = [1, 7, 5]
    for _ in range(count):
        window = np.zeros((1, 64), np.int32)
        window[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(logits(window)[0, len(tokens) - 1])))
    return tokens


@FEW
@pytest.mark.nightly
def test_a_folder_is_tuned_on_a_cube_resumed_bit_for_bit_and_read_by_transformers(folder):
    _, said = trained(folder, "whole")
    assert "arrays taken from" in said
    assert "new (adapters/" in said
    trained(folder, "parts", "train.steps=3")
    parts, _ = trained(folder, "parts")
    assert parts["resumed_from"] == 3
    to, again = exported(folder, "whole"), exported(folder, "parts")
    assert (to / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    before, after = entries(folder / "model.safetensors"), entries(to / "model.safetensors")
    changed = {name.split(".")[-2] for name in before if before[name].view().tobytes() != after[name].view().tobytes()}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}
    for name, content in TOKENIZER.items():
        assert json.loads((to / name).read_text()) == content
    config = json.loads((to / "config.json").read_text())
    assert [config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [1, 2, 0]
    read_by_transformers(to)


def read_by_transformers(folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="without torch nothing is read back")
    transformers = pytest.importorskip("transformers", reason="without transformers nothing is read back")
    for name in TOKENIZER:  # which are none
        (folder / name).unlink()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokens = np.arange(24).reshape(2, 12) * 7 % LLAMA.vocab
    ours = forward(load(folder))
    with torch.no_grad():
        want = theirs.eval()(torch.tensor(tokens)).logits.numpy()
        wanted = [1, 7, 5]
        for _ in range(50):
            wanted.append(int(theirs(torch.tensor([wanted])).logits[0, -1].argmax()))
    np.testing.assert_allclose(ours(tokens), want, rtol=1e-5, atol=1e-5)
    assert greedy(ours, 50) == wanted


def test_the_job_of_a_run_has_the_settings_of_the_folder(folder):
    made = job(folder, "x", "model.dropout=0.1")
    assert made.model["name"] == "decoder"
    assert (made.model["dim"], made.model["kv_heads"], made.model["dropout"]) == (LLAMA.dim, LLAMA.kv_heads, 0.1)
    assert made.checkpoint.start_from == str(folder)
    assert check(made) == []
    assert load(folder).settings == LLAMA


def test_a_plan_counts_gradients_and_optimizer_state_of_what_is_trained(folder):
    whole, tuned, frozen = (
        state_recipe(job(folder, "x", train=train)) for train in ("", ADAPTERS, 'freeze = ["blocks"]')
    )
    # and two counts of steps, beside some thousand parameters
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4, 4, pytest.approx(8, abs=0.002))
    sizes = {path: tensor[...].size for path, tensor in load(folder).params.items()}
    # rank 1: of each matrix its inputs and its outputs
    added = LLAMA.layers * (2 * (16 + 16) + 2 * (16 + 8) + (16 + 24))
    assert tuned.gradients == pytest.approx(4 * added / (sum(sizes.values()) + added), abs=1e-3)
    kept = 4 * sum(size for path, size in sizes.items() if not path.startswith("blocks/")) / sum(sizes.values())
    assert (frozen.gradients, frozen.optimizer) == (pytest.approx(kept, abs=1e-3), pytest.approx(2 * kept, abs=1e-2))
    assert tuned.dtypes.endswith("5.99% is trained"), "and times follow from that"


@FEW
@pytest.mark.nightly
def test_a_new_vocabulary_and_head_begin_with_the_layers_of_a_folder(folder):
    new = ["model.vocab=48", 'checkpoint.take=["blocks", "norm"]', "train.steps=1"]
    _, said = trained(folder, "new", *new, train='freeze = ["blocks"]')
    assert "2 new (embed, head)" in said
    before, after = entries(folder / "model.safetensors"), entries(exported(folder, "new") / "model.safetensors")
    assert after["lm_head.weight"].shape == (48, LLAMA.dim)
    layers = [name for name in before if ".layers." in name]
    assert layers
    assert all(before[name].view().tobytes() == after[name].view().tobytes() for name in layers)
    assert jnp.isfinite(after["lm_head.weight"].view()).all()


WRONG = {
    "another vocabulary": (["model.vocab=48"], ADAPTERS, "[model] of the job has vocab = 48"),
    "a part that does not fit": (["model.vocab=48", 'checkpoint.take=["embed", "blocks"]'], ADAPTERS, "embed"),
    "nothing to take": (['checkpoint.take=["layers"]'], ADAPTERS, "checkpoint.take: 'layers' matches nothing"),
    "no such matrix": ([], 'adapters = {rank = 4, paths = ["blocks/atention/*"]}', "did you mean 'blocks/attention'"),
    "no rank": ([], 'adapters = {paths = ["blocks"]}', "adapters have a rank"),
    "both": ([], ADAPTERS + '\nfreeze = ["embed"]', "with adapters, all parameters are frozen"),
    "frozen, and not there": ([], 'freeze = ["embeds"]', "did you mean 'embed'"),
    "all frozen": ([], 'freeze = ["*"]', "a run trains at least one parameter"),
    "no list": ([], 'freeze = "embed"', "freeze is a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", some(WRONG, ["a part that does not fit", "no rank", "both"]))
def test_what_does_not_go_with_a_folder_is_refused_before_anything_runs(case, folder):
    overrides, train, said = WRONG[case]

    def checked():
        if problems := check(job(folder, "x", *overrides, train=train)):
            raise JaxparError(*problems)

    with pytest.raises(JaxparError) as caught:
        checked()
    assert said in str(caught.value), str(caught.value)


def test_a_folder_whose_config_says_too_much_is_refused_by_name(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 8, "hidden_act": "relu"}))
    with pytest.raises(JaxparError) as caught:
        job(folder, "x")
    assert "sliding_window" in str(caught.value)
    assert "hidden_act" in str(caught.value)


def test_a_snapshot_of_hugging_faces_cache_keeps_all_of_its_files_though_they_are_links(folder, tmp_path, monkeypatch):
    blobs, snapshot = tmp_path / "models--me--my/blobs", tmp_path / "models--me--my/snapshots/3f9a"
    snapshot.mkdir(parents=True)
    names = sorted(path.name for path in folder.iterdir())
    shutil.copytree(folder, blobs)
    for number, name in enumerate(names):
        (blobs / name).rename(blobs / f"{number:040x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    assert check(job(snapshot, "x", f"data.path={tmp_path / 'data.npz'}")) == []
    model = load(snapshot)
    monkeypatch.setenv("HOME", str(tmp_path))
    export(model.params, model.settings, tmp_path / "out", origin=f"~/{snapshot.relative_to(tmp_path)}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == TOKENIZER["tokenizer.json"]
    assert not (tmp_path / "out/tokenizer.json").is_symlink()


def test_a_link_to_a_file_of_another_name_is_refused_and_not_published(folder, tmp_path):
    (tmp_path / "private").write_text("secret")
    (folder / "vocab.json").symlink_to(tmp_path / "private")
    shutil.copytree(folder, tmp_path / "mirrored")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "mirrored" / "tokenizer.json")  # of the same name: read
    (problem,) = check(job(folder, "x"))
    assert "vocab.json is a link to" in problem.got
    assert f"cp --remove-destination {tmp_path / 'private'} {folder / 'vocab.json'}" in problem.fix
    model = load(folder)
    with pytest.raises(JaxparError, match="is a link to"):
        export(model.params, model.settings, tmp_path / "out", origin=folder)
    assert not list((tmp_path / "out").glob("*"))
    assert resolve(job(folder, "x"), publishes=False).problems == ()  # as jaxpar evaluate, which copies nothing


@pytest.mark.parametrize(
    ("place", "name"), [("blobs", "0a" * 32), ("blobs", "0a" * 20), ("x", "0a" * 32), ("blobs", "id")]
)
def test_a_link_into_the_blobs_of_any_cache_is_followed(place, name, tmp_path):
    blob, link = tmp_path / "cache/models--me--my" / place / name, tmp_path / "my/tokenizer.json"
    for file in (blob, link):
        file.parent.mkdir(parents=True)
    blob.write_text("{}")
    link.symlink_to(blob)
    with nullcontext() if place == "blobs" and name != "id" else pytest.raises(JaxparError, match="is a link to"):
        check_links(link.parent)


def test_the_tokens_that_end_a_text_are_those_of_the_generation_config_as_in_transformers(folder):
    assert end_ids(folder) == (2, 3)
    (folder / "generation_config.json").unlink()
    assert end_ids(folder) == (2,)
    (folder / "config.json").unlink()
    assert end_ids(folder) == ()


@pytest.mark.nightly
def test_a_run_that_began_with_no_folder_is_exported_with_the_tokenizer_that_it_was_trained_with(tmp_path):
    words = llama3(tmp_path / "words")
    (tmp_path / "text.txt").write_text("the cat didn't sit on the mat. " * 200)
    made = loads(f"""
        model = {{name = "decoder", layers = 2, dim = 16, heads = 2, vocab = 512}}
        data = {{source = "text", path = "{tmp_path / "text.txt"}", tokenizer = "{words}", seq = 16}}
        train = {{steps = 1, global_batch = 8}}
        run.dir = "{tmp_path / "run"}"
        mesh.devices = 1
        """)
    run.train(made, stream=io.StringIO())
    to = tmp_path / "out"
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--format", "safetensors", "--to", str(to)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (to / name).read_bytes() == (words / name).read_bytes()
    kept, config = read_tokenizer(to), json.loads((to / "config.json").read_text())
    assert (kept.special_id("bos_token"), kept.special_id("eos_token")) == (0, 1)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
