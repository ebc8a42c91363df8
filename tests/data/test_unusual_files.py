"""Files that nobody would write by hand: each is refused in one message, quickly, and prints no control characters."""

import io
import json
import math
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint import manifest
from jaxpar.cli.main import main
from jaxpar.data.arrays import load_arrays
from jaxpar.errors import JaxparError, Problem
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_model
from jaxpar.models.huggingface import safetensors
from jaxpar.step.losses import next_token_loss


@pytest.mark.parametrize("text", ["[train]\nsteps = {}", "[model]\ndim = {}", "[parallel.rules]\na = [{}]"])
def test_an_integer_of_10_000_digits_is_refused(text):
    with pytest.raises(JaxparError, match="an integer of 40000 bits"):
        loads(text.format("0x" + "f" * 10_000))


SECTIONS = {
    "[train]": "unknown key train.steppes0",
    "[model]": "unknown key model.steppes0",
    "": "key 'steppes0' outside",
}


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(("section", "got"), SECTIONS.items())
def test_100_000_unknown_keys_are_told_in_seconds(section, got):
    begin = time.perf_counter()
    with pytest.raises(JaxparError) as caught:
        resolve_model(loads("\n".join([section, *(f"steppes{i} = 1" for i in range(100_000))])), next_token_loss)
    assert time.perf_counter() - begin < 10
    assert len(caught.value.problems) == 21
    assert caught.value.problems[0].got.startswith(got)
    assert caught.value.problems[-1].got.startswith("99980 more")


def test_a_list_of_a_checkpoint_with_a_time_that_is_none_is_damaged(tmp_path, capsys):
    for step, written in enumerate((math.inf, math.nan, 1e300, -1e300), start=1):
        folder = tmp_path / "checkpoints" / f"{step:06d}"
        folder.mkdir(parents=True)
        manifest.write(folder, step=step, written=written, scores={}, arrays={}, blocks={})
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("damaged") == 4


@pytest.mark.parametrize("shape", [[2**62, 0], [1] * 100, [2**70, 0]])
def test_a_tensor_of_a_shape_that_no_array_has_is_refused(tmp_path, shape):
    size = 4 * math.prod(shape)
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(JaxparError, match=r"model.safetensors: .*w"):
        [entry.view() for entry in safetensors.entries(file).values()]


def test_an_npz_that_claims_a_million_millions_of_rows_is_refused(tmp_path):
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as file:
        file.writestr("inputs.npy", made.getvalue())
    with pytest.raises(JaxparError, match=r"huge.npz"):
        load_arrays(Path(tmp_path / "huge.npz"))


ESCAPE = "\x1b]52;c;cm0=\x07"


def test_no_escape_of_a_job_or_an_array_reaches_the_terminal(tmp_path, capsys):
    (tmp_path / "job.toml").write_text(f"[train]\n{json.dumps(ESCAPE)} = 1\n[{json.dumps(ESCAPE)}]\na = 1\n")
    assert main(["train", str(tmp_path / "job.toml")]) == 1
    folder = tmp_path / "checkpoints" / "000001"
    folder.mkdir(parents=True)
    array = manifest.SavedArray((1,), f"float32{ESCAPE}", 4)
    manifest.write(folder, step=1, written=1.0, scores={ESCAPE: 1.0}, arrays={f"params/{ESCAPE}": array}, blocks={})
    for words in (["ls"], ["show"], ["verify"]):
        main(["checkpoint", *words, str(tmp_path)])
    (folder / ESCAPE.replace("/", "")).write_text("")
    main(["checkpoint", "verify", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "\\x1b]52" in err
    assert "\\x1b]52" in out
    assert not set(out + err) & {chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def test_a_problem_keeps_its_lines():
    assert str(Problem("a\nb", "c", "d\t")) == "a\nb\n  rule: c\n  fix:  d\t"


def test_the_rates_of_a_long_run_are_not_all_computed():
    from jaxpar.job.build import rates

    begin = time.perf_counter()
    job = loads("[optimizer]\nwarmup = 10")
    long = rates(job.optimizer, 2**31 - 1)
    assert long(2**31 - 2) == pytest.approx(1e-4, rel=1e-3)
    assert time.perf_counter() - begin < 5
    flat = rates(loads('[optimizer]\ndecay = "constant"').optimizer, 10)
    assert [flat(0), flat(9)] == pytest.approx([1e-3] * 2)
