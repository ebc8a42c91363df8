"""Moves sums of layers' gradients over devices out of scans: `sums` finds them, `once` rewrites the scans."""
