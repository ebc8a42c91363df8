"""Reports a run folder as one HTML page; works without jax, on any machine.

read    RUN/metrics.jsonl, run.json, job.toml and earlier ones, events.jsonl, checkpoints/  ─►  `RunContents`
page    `RunContents`  ─►  one HTML file: curves, throughput, checkpoints, events, configuration, layout
"""
