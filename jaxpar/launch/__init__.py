"""Several processes of one job, started, watched and started again."""
