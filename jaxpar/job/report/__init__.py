"""A run as one page: what its folder says of it, read without jax, on any machine.

read    RUN/metrics.jsonl, run.json, job.toml and those before it, events.jsonl, checkpoints/  ─►  `Told`
page    `Told`  ─►  one HTML file: curves, throughput, checkpoints, events, configuration, layout
"""
