"""Verbs that read a run: evaluate its checkpoints, sample text from it, or write it as a page.

jaxpar evaluate RUN    evaluates checkpoints of a run, or a Hugging Face model
jaxpar sample RUN      samples text from a trained decoder
jaxpar report RUN      writes a run as one HTML page
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_allow_import, add_json, check_file

if TYPE_CHECKING:
    from jaxpar.job.evaluation.evaluate import EvaluationResult
    from jaxpar.job.sample import SamplingRequest

EVALUATE_EXAMPLE = """\
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
SAMPLE_EXAMPLE = """\
  $ jaxpar sample runs/quickstart --prompt "def main(" --tokens 200
  $ jaxpar sample runs/quickstart --prompts prompts.jsonl --out answers.jsonl --top-p 0.9 --stop "\\n\\n"
  $ jaxpar sample runs/quickstart parallel.tensor=2 parallel.fsdp=2
  $ jaxpar sample runs/tune --chat                          # a line, an answer, until Ctrl-D

Without overrides the model runs on one device. This is not a server: to serve a model, `jaxpar checkpoint export
RUN --format safetensors --to FOLDER` writes a format that vLLM and others read.
"""
REPORT_EXAMPLE = """\
  $ jaxpar report runs/quickstart
  step 200, loss 1.7990, best eval loss 1.8011 at step 200, 2 checkpoints, 3 events, 0 changes
  page: runs/quickstart/report.html
"""


def add_evaluate(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "evaluate",
        help="evaluate checkpoints of a run, or a Hugging Face model",
        description="Print loss, perplexity, bits per byte and other metrics of a run's checkpoints on held-out "
        "examples and named sets, or of a Hugging Face folder on any data.",
        epilog=EVALUATE_EXAMPLE,
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


def add_sample(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "sample",
        help="sample text from a trained decoder",
        description="Load the model of a run and sample text from it, for one prompt, a file of prompts or a chat.",
        epilog=SAMPLE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument(
        "overrides", metavar="section.key=value", nargs="*", help="override the keys of parallel and mesh"
    )
    verb.add_argument("--prompt", default="\n", help="beginning of the text")
    verb.add_argument(
        "--prompts", metavar="FILE", type=Path, help="one prompt per line; of a .jsonl file the `prompt` of each line"
    )
    verb.add_argument(
        "--chat", action="store_true", help="answer each input line, with the chat template if the run has one"
    )
    verb.add_argument("--out", metavar="FILE", help="write prompt, text and tokens of each answer as a line of JSON")
    verb.add_argument("--tokens", type=int, default=200, help="tokens to generate (default 200)")
    verb.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    verb.add_argument("--top-k", type=int, default=0, help="sample from the K most likely tokens (default 0: all)")
    verb.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens of this total probability (default 1)",
    )
    verb.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end a text before this text or special token"
    )
    verb.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    add_allow_import(verb)
    add_json(verb)
    verb.set_defaults(run=run_sample)


def run_sample(args: argparse.Namespace) -> tuple[Any, int]:
    """Samples an answer per prompt and prints the texts, or writes them to --out."""
    check_file("--out", args.out, "answers.jsonl")
    from jaxpar.job.sample import SamplingRequest, read_prompts, sample, write_answers
    from jaxpar.step.sampling import Sampling

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    request = SamplingRequest(
        tokens=args.tokens, sampling=sampling, stop=tuple(args.stop), overrides=tuple(args.overrides)
    )
    if args.chat:
        return _chat(args, request), 0
    prompts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)
    samples = sample(args.folder, prompts, request, allow_import=args.allow_import)
    if args.out:
        write_answers(Path(args.out), samples)
        print(f"{len(samples.answers)} answers in {args.out}")
    else:
        print("\n---\n".join(each.prompt + each.text for each in samples.answers))
    if samples.rate:
        print(f"{samples.rate:.1f} tokens per second, starting and compiling included", file=sys.stderr)
    return asdict(samples), 0


def _chat(args: argparse.Namespace, asked: "SamplingRequest") -> dict[str, Any]:
    """Prints an answer to each line of stdin, until its end or Ctrl-C."""
    from jaxpar.errors import refuse
    from jaxpar.job.chat import chat

    for option, given in (("--prompts", args.prompts), ("--out", args.out)):
        if given is not None:
            raise refuse(f"--chat with {option}", rule="a chat reads lines and prints answers", fix=f"without {option}")
    messages = chat(
        args.folder, _lines(), lambda answer: print(answer, flush=True), asked, allow_import=args.allow_import
    )
    return {"messages": messages}


def _lines() -> Iterator[str]:
    """Yields the lines of stdin; prints a prompt if it is a terminal."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return


def add_report(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    meaning = "show a run on one page: curves, checkpoints, events, configuration, layout"
    verb = verbs.add_parser(
        "report",
        help=meaning,
        description=meaning + ". The page is one file, without scripts; it shows no speed for simulated devices.",
        epilog=REPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument("--html", metavar="FILE", help="the page (default: RUN/report.html)")
    add_json(verb)
    verb.set_defaults(run=write_report)


def write_report(args: argparse.Namespace) -> tuple[Any, int]:
    """Writes the page of a run and prints its path."""
    from jaxpar.buckets import READ, Bucket, is_address, local_folder
    from jaxpar.files import write_text
    from jaxpar.job.report import page
    from jaxpar.job.report.read import read

    if args.html:
        check_file("--html", args.html, "report.html")
    bucket = Bucket(args.folder, kind=READ) if is_address(args.folder) else None
    if bucket:
        bucket.pull()
    contents = read(bucket.local if bucket else local_folder(args.folder))
    file = Path(args.html) if args.html else contents.folder / "report.html"
    write_text(file, page.render(contents))
    if bucket:
        bucket.finish()
    print(page.text(contents), f"page: {file}", sep="\n")
    return {"page": str(file), "rows": len(contents.rows), "events": [vars(event) for event in contents.events]}, 0
