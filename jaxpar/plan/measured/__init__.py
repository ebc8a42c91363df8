"""What others measured, as a plan uses it: the error to expect, and machines calibrated on a run."""
