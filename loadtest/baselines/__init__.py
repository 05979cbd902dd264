"""Other model servers that run the same weights, for the comparison `python -m loadtest serving`.

Triton has its own virtual environment with the packages in `triton.txt`; modules of this package import nothing else of the project. A
server gets the folder of its model version in BASELINE_MODEL. Without it, a server returns a constant: the cost of the server alone.
"""
