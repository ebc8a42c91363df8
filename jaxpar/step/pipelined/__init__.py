"""Gradients of a step whose layers are spread over `pipe`: shardings, the cut model, the run, and no flush."""
