"""`jaxpar sample RUN`: samples text from a trained decoder."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_allow_import, add_json, check_file

if TYPE_CHECKING:
    from jaxpar.job.sample import SamplingRequest

EXAMPLE = """\
  $ jaxpar sample runs/quickstart --prompt "def main(" --tokens 200
  $ jaxpar sample runs/quickstart --prompts prompts.jsonl --out answers.jsonl --top-p 0.9 --stop "\\n\\n"
  $ jaxpar sample runs/quickstart parallel.tensor=2 parallel.fsdp=2
  $ jaxpar sample runs/tune --chat                          # a line, an answer, until Ctrl-D

Without overrides the model runs on one device. This is not a server: to serve a model, `jaxpar checkpoint export
RUN --format safetensors --to FOLDER` writes a format that vLLM and others read.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "sample",
        help="sample text from a trained decoder",
        description="Load the model of a run and sample text from it, for one prompt, a file of prompts or a chat.",
        epilog=EXAMPLE,
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
