"""Models of `handwritten` on layouts: all pairs and triples of axes and settings, and a draw of more.

python tests/combinations.py COUNT SEED     draws, runs each in a process with a time limit, says what is neither
                                            equal to one device nor refused
"""

import itertools
import random
import sys
from collections import Counter

from handwritten import LOSSES, MODELS
from outcomes import Combination, outcomes

AXES = {
    "pipe": [{"pipe": 2}],
    "context": [{"context": 2}],
    "tensor": [{"tensor": 2}, {"tensor": 2, "sequence": True}],
    "fsdp": [{"fsdp": 2, "zero": zero} for zero in range(4)],
}
DEVICES, MICROBATCHES = 8, 4
PHASED = ("1f1b_phased", "gpipe", "interleaved_phased")
MIXED = ("1f1b", "zb_h1", "interleaved", "zb_v")


def layouts() -> list[dict]:
    """Returns the sizes of every pair and triple of axes, with what each may be set to; `data` fills the devices."""
    found = []
    for count in (2, 3):
        for axes in itertools.combinations(AXES, count):
            for settings in itertools.product(*(AXES[axis] for axis in axes)):
                sizes = {key: value for setting in settings for key, value in setting.items()}
                found.append(sizes | ({"data": DEVICES // 4} if count == 2 else {}))
    return found


def grid() -> list[Combination]:
    """Returns every layout with one of the three models, in turns, or with two where three axes meet."""
    kinds = itertools.cycle([("transformer", "one-hot"), ("shifting", "looked up"), ("looking", "one-hot")])
    return [
        Combination(*next(kinds), sizes, {"microbatches": MICROBATCHES} if "pipe" in sizes else {})
        for sizes in layouts()
        for _ in range(1 if "data" in sizes else 2)
    ]


def drawn(count: int, seed: int) -> list[Combination]:
    """Returns combinations at random, of models, losses, layouts, schedules and how they compute."""
    dice = random.Random(seed)
    return [_one(dice) for _ in range(count)]


def _one(dice: random.Random) -> Combination:
    sizes, pipeline, numerics = {}, {}, {}
    while len(sizes) < 2:
        sizes = {}
        for axis in dice.sample(list(AXES), 3):
            room = DEVICES
            for name in AXES:
                room //= sizes.get(name, 1)
            if dice.random() < 0.8 and room > 1:
                setting = dict(dice.choice(AXES[axis]))
                setting[axis] = dice.choice([size for size in (2, 2, 4) if size <= room])
                sizes |= setting
    left = DEVICES
    for name in AXES:
        left //= sizes.get(name, 1)
    sizes |= {"data": left} if left > 1 else {}
    if "pipe" in sizes:
        pipeline["microbatches"] = dice.choice([4, 8] if sizes.get("data", 1) * sizes.get("fsdp", 1) <= 2 else [4])
        pipeline["schedule"] = dice.choice(PHASED + PHASED + MIXED)
        more = [{}, {}, {"head": "spread"}, {"keep": "residuals"}, {"gather": "tick"}]
        pipeline |= dice.choice(more)
    elif dice.random() < 0.3:
        numerics["accumulate"] = 2
    if dice.random() < 0.2:
        numerics["remat"] = "full"
    return Combination(dice.choice(list(MODELS)), dice.choice(list(LOSSES)), sizes, pipeline, numerics)


if __name__ == "__main__":
    chosen = drawn(int(sys.argv[1]), int(sys.argv[2]))
    tally: Counter = Counter()
    for start in range(0, len(chosen), 20):
        some = chosen[start : start + 20]
        for each, found in zip(some, outcomes(some), strict=True):
            kind = found.split(":")[0]
            tally[kind] += 1
            print(f"{each}: {found if kind != 'refused' else found.splitlines()[0]}", flush=True)
    print(dict(tally))
