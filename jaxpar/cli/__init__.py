"""Verbs, one file each: parse, call one room, print.

Who only waits for text does not wait for JAX. It is imported by

    train, sample, inspect, check   they trace the model, to run it, compile it, or place its parameters
    launch, doctor                  they continue runs, and look at devices
    checkpoint diff, export         where arrays are compared, or written anew
    bench, but for `planner`        to measure, and to compile
    plan                            with --verify; for a model without formulas, or an optimizer whose state depends on
                                    shapes (adafactor, muon) or is not known before it is traced (others of optax, or
                                    arguments); for a loss of the user's own

and by nothing else: no --help, no --print-defaults, no refusal of a job's file, `schedule`, `partition`, `plan` of a
decoder, `checkpoint ls`, `show` and `verify`.

To add a flag: an argument in its verb's file; its effect belongs into the room that the verb calls.
"""
