"""One process of a side: makes steps when it is told to, and says what they cost. Imports nothing but Python's own.

    the first line out   {"version": "2.13.0"}                           once it is there
    a line in            none 4                                          a way, and how many steps
    a line out           {"cpu": seconds, "wall": seconds, "loss": x}    of these steps, in this process

What libraries print goes to stderr. Between turns a process waits for a line, and costs nothing.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping


def serve(version: str, ways: Mapping[str, Callable[[int], float]]) -> None:
    """Answers each line until there are no more.

    Args:
      version: Of what computes.
      ways: Name of a way to run to what makes so many steps, waits for them, and returns the last loss.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        way, count = line.split()
        cpu, wall = time.process_time(), time.perf_counter()
        loss = ways[way](int(count))
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "loss": loss}
        answers.write(json.dumps(spent) + "\n")
