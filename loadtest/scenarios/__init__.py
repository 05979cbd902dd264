"""Scenarios of `python -m loadtest`: each measures one aspect of the service and writes its results as JSON lines."""
