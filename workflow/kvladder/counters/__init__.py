"""Scrape the servers' /metrics pages, and read one normalised schema from them over all engines and versions."""
