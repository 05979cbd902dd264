"""Benchmarks of the kernels: every backend of a family and every installed baseline, checked against the reference and then timed.

`python -m kernels.bench FAMILY` prints a table and writes its figures to results/ as JSON lines.
"""
