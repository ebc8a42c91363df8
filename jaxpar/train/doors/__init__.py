"""What a job does, in Python: `jp.fit` trains, saves, resumes and evaluates; `jp.save` and `jp.restore` take a path."""
