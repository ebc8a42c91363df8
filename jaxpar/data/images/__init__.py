"""Pictures and their classes: from a folder per class, tar files of webdataset, or Parquet.

    folders ─► names and labels ──────────────────────┐
    .tar ────► offsets, cached in RUN/data ───────────┼─► Index ─► encoded bytes ─► threads decode, crop, resize
    .parquet ► copied to RUN/data/pictures-*.bin ─────┘

Terms: `ImageConfig` (the table `[data.images]`), `Entries` and their `Index` (file, offset, size and label of every
picture), a `Crop` box, `Images` (the source).

To add a format: a function that returns `Entries`, and a line in `source.open_index`.
"""
