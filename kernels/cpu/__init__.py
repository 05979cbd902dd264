"""Shared by the CPU backends: compiled loops over vectors of float32, packed weights and the cache of compiled code."""
