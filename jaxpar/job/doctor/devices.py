"""Probes the devices in a child process, which may hang or crash without harm."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from jaxpar.job.doctor.finding import Finding

PROBE = """
import json, sys
simulated = int(sys.argv[1])
if simulated:
    from jaxpar.mesh.devices import simulate
    simulate(simulated)
import jax
from jaxpar.mesh.devices import visible_devices
visible_devices()
devices = jax.local_devices()
jax.block_until_ready(jax.numpy.ones(8) + 1)
limits = [stats["bytes_limit"] for d in devices if (stats := d.memory_stats()) and "bytes_limit" in stats]
print(json.dumps({"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform,
                  "bytes": min(limits, default=0)}))
"""


@dataclass(frozen=True)
class Probe:
    """A child process that probes the devices.

    Attributes:
      process: The process.
      out: Its standard output.
      err: Its standard error, with XLA's messages.
      start_time: Start time by `time.monotonic`.
      environment: Its environment variables.
    """

    process: subprocess.Popen
    out: IO[str]
    err: IO[str]
    start_time: float
    environment: Mapping[str, str]


def start(environment: Mapping[str, str], *, simulate: int, code: str = PROBE) -> Probe:
    """Starts the probe, with as many simulated devices; 0 probes the real ones."""
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # no pipes: a grandchild may keep them open
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(simulate)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        env=dict(environment), start_new_session=True,
    )  # fmt: skip
    return Probe(process, out, err, time.monotonic(), environment)


def finish(probe: Probe, *, seconds: float) -> tuple[Finding, int]:
    """Returns the probe's finding and the device count; kills it `seconds` after its start."""
    with probe.out, probe.err:
        return _finish(probe, seconds)


def _finish(probe: Probe, seconds: float) -> tuple[Finding, int]:
    try:
        code = probe.process.wait(max(0.05, probe.start_time + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(probe.process.pid, signal.SIGKILL)
        try:
            probe.process.wait(1)
        except subprocess.TimeoutExpired:  # stuck in the driver, out of reach of signals: the system reaps it later
            pass
        fix = "does nvidia-smi answer, where there are GPUs? Or a busy machine: try again"
        return Finding("devices", "problem", f"no answer within {seconds:g} s", fix), 0
    out, err = _read(probe.out), _read(probe.err)
    if code == 0:
        return _parse_report(json.loads(out.splitlines()[-1]))
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", err)
    flags = probe.environment.get("XLA_FLAGS", "")
    if unknown or ("flag" in err.lower() and "XLA_FLAGS" in err):
        flag = unknown[1].strip()[:200] if unknown else flags[:200]
        return Finding("XLA_FLAGS", "problem", f"XLA ends the process: it does not know {flag}", "take it out of "
            "XLA_FLAGS; flags come and go with the version of jaxlib"), 0  # fmt: skip
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"status {code}")
    fix = "what that line says; python -c 'import jax; jax.devices()' shows all of it"
    return Finding("devices", "problem", f"JAX finds no devices: {last[:300]}", fix), 0


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _parse_report(found: dict[str, Any]) -> tuple[Finding, int]:
    from jaxpar.units import show_bytes

    simulated = " (simulated)" if found["platform"] == "cpu" and found["count"] > 1 else ""
    memory = f", {show_bytes(found['bytes'])} each" if found["bytes"] else ""
    return Finding("devices", "ok", f"{found['count']} x {found['kind']}{simulated}{memory}"), found["count"]
