"""Machines, the share of their data sheets that they reach, and software models of training programs."""
