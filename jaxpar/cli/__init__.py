"""The verbs of the command line, one file each: parse the arguments, call one package, print the result.

A verb that only prints text does not import JAX. These verbs import it:

    train, sample, inspect, check   they trace the model to run it, compile it or place its parameters
    launch, doctor                  they continue runs and examine devices
    checkpoint diff, export         they compare arrays, or write them in another format
    bench, but for `planner`        to measure and to compile
    plan                            with --verify; for a model without formulas; for an optimizer whose state depends on
                                    shapes (adafactor, muon) or is unknown until it is traced (other optax optimizers,
                                    or arguments); for a user's loss function

All other verbs work without JAX: --help, --print-defaults, errors in a job's file, `schedule`, `partition`, `plan` of a
decoder, `checkpoint ls`, `show` and `verify`.

To add a flag, add an argument in the verb's file and implement its effect in the package that the verb calls.
"""
