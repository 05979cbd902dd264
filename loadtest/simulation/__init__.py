"""Ways of batching beside each other on a virtual clock, with what turns were measured to cost: `python -m loadtest.simulate`."""
