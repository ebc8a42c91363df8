"""Predicts, before anything is compiled: what a layout costs and needs, and which would be better."""
