"""Tests on real GPUs: a run of them that leaves one out says so, and does not end with status 0."""

import jax
import pytest

LEFT_OUT = 6  # pytest's own statuses end at 5


@pytest.fixture(scope="session")
def gpus():
    """Returns the GPUs; skips where there are none."""
    found = [device for device in jax.devices() if device.platform == "gpu"]
    if not found:
        pytest.skip(f"no GPU: JAX sees {jax.devices()[0].device_kind}")
    return found


@pytest.fixture(scope="session")
def two_gpus(gpus):
    """Returns the GPUs; skips where there is one."""
    if len(gpus) < 2:
        pytest.skip("one GPU: links need two")
    return gpus


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter.stats.get("skipped"):
        session.exitstatus = LEFT_OUT


def pytest_terminal_summary(terminalreporter, exitstatus):
    skipped = terminalreporter.stats.get("skipped", [])
    for report in skipped:
        terminalreporter.write_line(f"not run: {report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")
    if exitstatus == LEFT_OUT:
        terminalreporter.write_line(f"status {LEFT_OUT}: {len(skipped)} tests that were asked for did not run")
