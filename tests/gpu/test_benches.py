"""The benches of a machine, on its real GPUs: what they fit is within what such hardware can do."""

import pytest

from jaxpar.measure import machine


@pytest.mark.usefixtures("two_gpus")
def test_links_of_real_devices_are_fitted(tmp_path):
    result = machine.links(write=str(tmp_path / "mine.toml"), rounds=5)
    assert 1e9 < result["links"]["inside"]["bandwidth"] < 2e12
    assert result["fits"]["inside"]["error"] < 0.5


@pytest.mark.usefixtures("gpus")
def test_products_of_a_real_device_are_fitted(tmp_path):
    result = machine.gemm(write=str(tmp_path / "mine.toml"), rounds=5)
    assert 0.2 < result["gemm"]["top"] <= 1
    assert result["error"] < 0.3
