"""Rows of a batch: windows of whole documents, and examples of several sets mixed by weights."""
