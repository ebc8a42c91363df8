"""Reports a run folder as one HTML page; works without jax, on any machine.

read    RUN/metrics.jsonl, run.json, job.toml and earlier ones, events.jsonl, checkpoints/  ─►  `RunContents`
kernel_times   RUN/profile/  ─►  kernel time by kind, next to the planner's
page    `RunContents`  ─►  one HTML file: curves, throughput, checkpoints, events, configuration, layout
"""
