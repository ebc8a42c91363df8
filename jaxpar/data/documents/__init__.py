"""Documents and where they lie: whole files, lines of JSONL, rows of Parquet.

    files ─► cut        a file is a document, read in pieces           ┐
    files ─► jsonl      a line is a document: a column of text,        ├─► Piece ─► encoder ─► tokens
    files ─► parquet    a row likewise; or of messages, by a template  ┘

A piece says where the next begins, so that packing goes on from there after a kill.

To add a format: a function from a file and a place to rows, and a line of `rows._reader`.
"""
