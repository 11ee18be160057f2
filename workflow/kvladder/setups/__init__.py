"""One module a connector family: configuration to argv, environment and side processes, and how to read its counters."""
