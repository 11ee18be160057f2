"""What to send: one module a kind of workload, each exporting its configuration class as ``CONFIG``.

A kind's module is its name with ``_`` for ``-``; `kvladder.workloads.base` says what the class has to offer.
"""
