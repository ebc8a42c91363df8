"""A misspelt name is answered with the nearest one, whatever its case."""

import re

import pytest

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError, suggest
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import TABLES, meanings
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.other_names import OTHER_NAMES, OTHER_VALUES


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("adamW", ["adam", "adamw", "sgd"], "adamw"),
        ("ADAMW", ["adam", "adamw", "sgd"], "adamw"),
        ("SGD", ["adam", "adamw", "sgd"], "sgd"),
        ("decoder", ["MLP", "Decoder"], "Decoder"),
        ("Global_Batch", ["global_batch", "growth"], "global_batch"),
        ("lerning_rate", ["learning_rate"], "learning_rate"),
        ("embed_dim", ["embed", "mlp"], "embed"),  # no choice has its meaning of other frameworks, dim
        ("mlp_dim", ["embed", "mlp"], "mlp"),
    ],
)
def test_case_does_not_count(word, known, meant):
    assert suggest(word, known) == f"did you mean {meant!r}?"


def test_what_is_near_to_nothing_lists_the_names():
    assert suggest("zzz", ["adam", "SGD"]) == "one of: SGD, adam"
    assert suggest("dp", ["fsdp"]) == "one of: fsdp"


# an override of a newcomer, and how he is told to write it
FOREIGN = [
    ("parallel.dp=8", "'data'"),  # not fsdp
    ("parallel.sp=true", "'sequence'"),
    ("parallel.context_parallel=2", "'context'"),
    ("parallel.zero_stage=3", "'zero'"),
    ("model.hidden_size=64", "'dim'"),  # not hidden
    ("model.mlp_dim=64", "'hidden'"),  # not dim
    ("model.rope_theta=1e4", "'rope_base'"),
    ("optimizer.lr=1e-3", "'learning_rate'"),
    ("train.lr=1e-3", "optimizer.learning_rate"),
    ("train.learning_rate=1e-3", "optimizer.learning_rate"),
    ("checkpoint.save_every=5", "'every'"),
    ("data.batch_size=8", "train.global_batch"),
    ("data.batch=8", "train.global_batch"),  # not path
    ("checkpoint.log_every=8", "metrics.show_every"),  # not every
    ("run.resume_from=x", "checkpoint.start_from"),  # not resume
]


@pytest.mark.parametrize(("override", "meant"), FOREIGN)
def test_a_name_of_another_framework_is_answered_with_ours_and_not_with_one_spelt_alike(override, meant):
    key, _, value = override.partition("=")
    with pytest.raises(JaxparError) as caught:
        DecoderConfig(**{key.removeprefix("model."): value}) if "model." in key else loads("", [override])
    (problem,) = caught.value.problems
    assert problem.fix == f"did you mean {meant}?"


def test_python_answers_with_the_same_names():
    with pytest.raises(JaxparError, match="fix:  data=8"):
        jp.Parallel(dp=8)


def test_every_name_of_another_framework_stands_for_a_key_and_is_none():
    keys = {key for cls in (*TABLES.values(), DecoderConfig) for key in meanings(cls)}
    assert set(OTHER_NAMES.values()) <= keys
    assert set(OTHER_NAMES) - {"batch"} & keys == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "runs/mine"], "no verb 'export': jaxpar checkpoint export"),
        (["resume", "runs/mine"], "no verb 'resume': jaxpar train, which resumes by itself"),
        (["help"], "no verb 'help': jaxpar --help"),
        (["check", "job.toml", "--train.steps=3"], "a key of the job is overridden without dashes: train.steps=3"),
        (["train", "job.toml", "--train.steps", "3"], "a key of the job is overridden without dashes: train.steps=..."),
    ],
)
def test_a_verb_or_option_of_another_command_is_answered_with_what_does_it_here(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.steps=1e3", "steps = 1000"),
        ('train.steps="30"', "steps = 30"),
        ("metrics.loggers=wandb", 'loggers = ["wandb"]'),
        ('optimizer.learning_rate="1e-3"', "learning_rate = 0.001"),
        ("lr=1e-3", "optimizer.learning_rate=1e-3"),
        ("global_batch=8", "train.global_batch=8"),
    ],
)
def test_a_value_in_another_form_is_answered_with_itself(override, fix):
    with pytest.raises(JaxparError) as caught:
        loads("", [override])
    (problem,) = caught.value.problems
    assert problem.fix == fix
    key = fix if "=" in override.partition(".")[0] else f"{override.partition('.')[0]}.{fix}"
    loads("", [re.sub(" = ", "=", key)])  # as it is told


@pytest.mark.parametrize("override", ["train.steps=abc", "train.steps=1.5", "train.steps=inf", "data=a", "zzz=1"])
def test_a_value_without_another_form_keeps_the_default_or_the_form(override):
    with pytest.raises(JaxparError) as caught:
        loads("", [override])
    assert caught.value.problems[0].fix in ("default: 100", "train.steps=100")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("epochs=3", "train.steps = epochs x examples / train.global_batch"),
        ("train.epochs=3", "train.steps = epochs x examples / train.global_batch"),
        ("bf16=true", "train.precision=..."),
        ("wandb=true", "metrics.loggers=..."),
        ('train.profile="3"', "default: []"),  # of whole numbers: a list of text would be refused again
        ('data.augment="flip"', 'augment = ["flip"]'),
    ],
)
def test_a_value_of_another_meaning_is_not_carried_into_our_key(override, fix):
    with pytest.raises(JaxparError) as caught:
        loads("", [override])
    assert caught.value.problems[0].fix == fix


def test_other_values_are_of_other_names():
    assert OTHER_VALUES <= set(OTHER_NAMES)
