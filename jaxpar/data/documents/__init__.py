"""Reads documents from files: whole text files, lines of JSONL, rows of Parquet.

    files ─► text       a file is a document, read in pieces           ┐
    files ─► jsonl      a line is a document: a column of text,        ├─► Piece ─► encoder ─► tokens
    files ─► parquet    a row likewise; or of messages, by a template  ┘

A piece has the place where the next piece begins, so that packing can resume there after a kill.

To add a format: a function from a file and a place to rows, and a line in `row_files.read_rows`.
"""
