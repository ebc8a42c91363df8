"""The command says which verb was meant, and a shell can complete it."""

import subprocess
import sys

import pytest

from jaxpar.cli.completion import SHELLS
from jaxpar.cli.main import VERBS, main

VERB_NAMES = [verb.__name__.rpartition(".")[2] for verb in VERBS]


@pytest.mark.parametrize(
    ("word", "said"),
    [("trian", "did you mean 'train'?"), ("chekpoint", "did you mean 'checkpoint'?"), ("xyz", "one of: check,"),
     ("configs/quickstart.toml", "jaxpar train configs/quickstart.toml")],
)  # fmt: skip
def test_a_verb_that_there_is_not_is_answered_with_the_one_that_was_meant(word, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main([word, "configs/quickstart.toml"])
    assert caught.value.code == 2
    assert f"no verb {word!r}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_is_told_every_verb_and_option(shell, capsys):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert not [verb for verb in VERB_NAMES if verb not in said]
    assert "print-defaults" in said


def test_bash_completes_with_the_script(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "jaxpar.sh").write_text(capsys.readouterr().out)
    (tmp_path / "mine.toml").write_text("")

    def completed(*words):
        script = (
            f"source jaxpar.sh; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            "$(complete -p jaxpar | grep -oP '(?<=-F )\\S+'); printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        run = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
        return run.stdout.split()

    assert completed("jaxpar", "tr") == ["train"]
    assert completed("jaxpar", "sample", "--top") == ["--top-k", "--top-p"]
    assert completed("jaxpar", "train", "mi") == ["mine.toml"]


def test_without_shtab_the_way_to_it_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'jaxpar[completion]'" in capsys.readouterr().err
