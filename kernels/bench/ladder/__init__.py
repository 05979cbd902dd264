"""The optimisations of an LSTM that Appleyard et al. 2016 published, in their order, then cuDNN and our backend, on the same device.

`python -m kernels.bench ladder` runs all rungs. Each rung is a call over the same data and weights: four layers of 512 units, 64 rows of
100 steps. It is checked against the reference before it is timed.
"""
