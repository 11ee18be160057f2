"""Where and from what a number comes: host, harness, and later the archive."""
