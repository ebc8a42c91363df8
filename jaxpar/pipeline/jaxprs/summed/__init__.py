"""Sums of layers' gradients over devices, taken out of the scans that make them: `sums` finds, `once` rewrites."""
