"""Scenarios of `python -m loadtest.scenarios`: each measures one aspect of the service and writes its results as JSON lines."""
