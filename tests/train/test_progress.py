"""The lines that a run prints: the speed of real devices, and none of simulated ones."""

import io

from jaxpar.job.file.parse import loads
from jaxpar.job.parts.names import counted_unit
from jaxpar.train.progress import Progress

ROW = {"step": 20, "loss": 1.25, "tokens": 1000.0, "seconds": 0.5}


def printed(**settings):
    stream = io.StringIO()
    with Progress(50, every=10, flops=3e12, peak=60e12, stream=stream, **settings) as progress:
        progress.step(ROW)
    return stream.getvalue()


def test_a_line_has_the_speed_of_real_devices():
    assert printed() == "step 20/50  loss 1.2500  2 k tokens/s  MFU 10.0%  500 ms/step  15 s left\n"


def test_a_line_has_no_speed_of_simulated_devices():
    assert printed(simulated=True) == "step 20/50  loss 1.2500  15 s left\n"


def test_a_job_counts_what_its_loss_counts():
    losses = {"next_token": "tokens", "classify": "examples", "dpo": "pairs", "my.loss:sums": "loss terms"}
    assert {loss: counted_unit(loads(f'[train]\nloss = "{loss}"')) for loss in losses} == losses
