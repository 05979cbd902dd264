"""Agree first, then time: every backend of a kernel family beside every peer that is installed, on one device.

`python -m kernels.bench FAMILY` prints a table and writes the same figures as JSON lines under results/.
"""
