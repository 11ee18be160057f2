"""What the workflow knows before it runs anything: what a trial depends on, how long it takes, what still fits."""
