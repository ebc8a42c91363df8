"""A job as Python functions: `jp.train_step`, `jp.fit`, which saves, resumes and evaluates, `jp.save`, `jp.restore`."""
