"""Moves sums of layers' gradients over devices out of scans: `find` finds the sums, `hoist` rewrites the scans."""
