"""`jaxpar evaluate RUN`: evaluates checkpoints of a run, or a Hugging Face model."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_allow_import, add_json

if TYPE_CHECKING:
    from jaxpar.job.evaluation.evaluate import EvaluationResult

EXAMPLE = """\
  $ jaxpar evaluate runs/quickstart
  $ jaxpar evaluate runs/quickstart --checkpoints all           # a table, one row a checkpoint
  $ jaxpar evaluate runs/quickstart data.source=text data.path=test.txt
  $ jaxpar evaluate runs/quickstart mesh.simulate=0 mesh.devices=1 parallel.data=1 parallel.fsdp=1 parallel.tensor=1
  $ jaxpar evaluate my-llama data.source=text data.path=test.txt

Without overrides a run is evaluated on its held-out examples and its sets, as while it was trained. With data.source
or data.path, all examples of these data are evaluated; data.sets.NAME.path=FILE adds a set.

Tasks of lm-eval (pip install 'lm-eval[hf]') run on the exported folder of a run with a Hugging Face tokenizer:
  $ jaxpar checkpoint export RUN --format safetensors --to FOLDER
  $ lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "evaluate",
        help="evaluate checkpoints of a run, or a Hugging Face model",
        description="Print loss, perplexity, bits per byte and other metrics of a run's checkpoints on held-out "
        "examples and named sets, or of a Hugging Face folder on any data.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("folder", metavar="RUN", help="the folder of a run, one checkpoint, or a Hugging Face folder")
    verb.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="override keys of data, parallel, mesh and metrics"
    )
    verb.add_argument(
        "--checkpoints",
        metavar="WHICH",
        default="last",
        help="last (default), all, best by the evaluations while training, or steps such as 100,200",
    )
    add_allow_import(verb)
    add_json(verb)
    verb.set_defaults(run=run_evaluate)


def run_evaluate(args: argparse.Namespace) -> tuple[Any, int]:
    """Evaluates the checkpoints and prints a row for each one and set."""
    from jaxpar.job.evaluation.evaluate import EvaluationRequest, evaluate

    request = EvaluationRequest(checkpoints=args.checkpoints, overrides=tuple(args.overrides))
    result = evaluate(args.folder, request, allow_import=args.allow_import)
    print("\n".join([_table(result), *result.notes]))
    return asdict(result), 0


def _table(result: "EvaluationResult") -> str:
    """Formats a row per checkpoint and set; leaves out the columns of steps and sets that say nothing."""
    from jaxpar.columns import table, terminal_width

    names = list(dict.fromkeys(name for score in result.scores for name in score.metrics))
    rows = [["step", "set", result.unit, *(name.replace("_", " ") for name in names)]]
    for score in result.scores:
        values = [f"{score.metrics[name]:.4f}" if name in score.metrics else "" for name in names]
        rows.append([str(score.step), score.set or result.main, f"{score.count:,.0f}", *values])
    if result.scores[0].step is None:
        rows = [row[1:] for row in rows]
    return table(rows, right=[i for i, name in enumerate(rows[0]) if name != "set"], indent="", width=terminal_width())
