"""The decoder: a process of each frontend that parses and validates large bodies, so that these do not stall the event loop."""
