"""`seqserve top`: a terminal view of the figures of a running service, from its metrics. Nothing here runs inside the service."""
