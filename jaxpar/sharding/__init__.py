"""From the names a model gives its dims to arrays that are born where they belong."""
