"""What the machine does while a trial runs: host and device samples, taken from a process of their own."""
