"""A small serving engine around the cache: schedule, run, commit, collect."""
