"""Predicts, before anything is compiled: what a layout costs and needs, and which would be better.

    model/     what a plan asks of a model: a decoder answers with formulas, any other model is traced
    machine/   chips in nodes, what they reach of their data sheets, and what a program does with them
    rules/     published rules of thumb beside the cost model
    pages/     a plan as text, HTML and bars

Nouns: a `Candidate` (one layout, or arrays of many), `Memory` and `StepTime` by cause, a `Question` and its answer.
To add a model family: what answers `model.base.Model`. To add a machine: `machine/file.py` reads a user's measurements.
"""
