"""Server processes: start, readiness, watch, clean stop, ports, device leases, and what a trial may leave behind.

Linux only. Nothing is imported here, so that the supervisor process stays small.
"""
