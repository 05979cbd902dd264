"""Sequence encoders: arrays in, arrays out. This package knows nothing of requests."""
