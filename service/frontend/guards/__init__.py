"""Limits on what clients may take: connections, memory, bodies, quotas, retries, and the start queue."""
