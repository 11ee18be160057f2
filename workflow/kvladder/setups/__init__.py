"""One module a connector family: configuration to argv, environment, side processes, and how its counters read."""
