"""Sequence encoders: arrays in, arrays out. Nothing here has heard of a request."""
