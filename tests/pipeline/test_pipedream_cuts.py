"""The plans of PipeDream's public profiles, run on 4, 8 and 16 simulated devices."""

import subprocess
import sys
from pathlib import Path

import pytest
from pipedream_cuts import run

SCRIPT = Path(__file__).parent / "pipedream_cuts.py"


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        pytest.param("vgg16", 4, "3-1", marks=pytest.mark.full),
        pytest.param("vgg16", 8, "7-1", marks=pytest.mark.full),
        pytest.param("alexnet", 4, "3-1", marks=pytest.mark.slow),
        pytest.param("alexnet", 8, "7-1", marks=pytest.mark.full),
        pytest.param("gnmt", 4, "1-1-1-1", marks=pytest.mark.full),
        pytest.param("gnmt", 8, "1-1-1-1-1-1-1-1", marks=pytest.mark.full),
        pytest.param("resnet", 4, "4", marks=pytest.mark.slow),
        pytest.param("resnet", 8, "8", marks=pytest.mark.full),
    ],
)
def test_a_plan_trains_as_flax_alone(name, devices, expected):
    assert run(name, devices) == expected


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("vgg16", "15-1", marks=pytest.mark.slow),
        pytest.param("alexnet", "15-1", marks=pytest.mark.full),
        pytest.param("gnmt", "1-1-1-1-1-1-1-1-1-1-1-4-1", marks=pytest.mark.full),
        pytest.param("resnet", "16", marks=pytest.mark.full),
    ],
)
def test_a_plan_for_16_devices_trains_as_flax_alone(name, expected):
    done = subprocess.run([sys.executable, SCRIPT, name, "16"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == expected
