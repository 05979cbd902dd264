"""The decoder of large bodies."""
