"""Published measurements: the expected error of a prediction, and machines calibrated on a run."""
