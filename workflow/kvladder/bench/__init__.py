"""The truth bench: load clients against a reference server that writes down what it really did, and when.

``server.c`` answers on a schedule and logs every write; `cell` runs one client against it; `truth` pairs the client's
records with the log, request by request; `tables` holds the results against the goals; `figures` and `report` show
them. A client's *bias* is the TTFT it reports less the one that the log proves: first token's write less arrival of the
request's first byte.
"""
