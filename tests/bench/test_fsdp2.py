"""The bench beside PyTorch's FSDP2: how turns are compared, and what a side is told and answers."""

import json
import subprocess
import sys

from bench.command import environment
from bench.fsdp2.pairs import compare


def test_the_better_way_of_each_side_counts_and_rounds_are_paired():
    found = compare(
        {
            "jaxpar, none": [3.0, 3.0, 3.0],
            "jaxpar, full": [1.0, 2.0, 9.0],
            "torch, none": [2.0, 2.0, 10.0],
            "torch, full": [5.0, 5.0, 5.0],
        }
    )
    assert found["best"] == ["jaxpar, full", "torch, none"]
    assert found["ratios"] == [0.5, 1.0, 0.9]
    assert found["ratio"] == 0.9
    assert not found["holds"]  # above 0.85


def test_a_process_answers_every_turn_and_needs_no_jax():
    code = (
        "import sys; from bench.fsdp2 import torch_side, turns; assert 'jax' not in sys.modules\n"
        "turns.serve('1.0', {'none': float, 'full': lambda count: print('a library speaks') or -float(count)})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="none 3\nfull 2\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(),
    )
    first, *turns = map(json.loads, done.stdout.splitlines())
    assert first == {"version": "1.0"}
    assert [turn["loss"] for turn in turns] == [3.0, -2.0]
    assert all(turn["cpu"] >= 0 for turn in turns)
    assert "a library speaks" in done.stderr
