"""One trial from its first process to ``trial.json``: servers up, passes, drains, raw records, servers gone."""
