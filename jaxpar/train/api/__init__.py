"""Training from Python: `jp.train_step`, `jp.fit` (which saves, resumes and evaluates), `jp.save`, `jp.restore`."""
