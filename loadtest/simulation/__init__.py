"""Batching policies compared on a virtual clock, with batch costs measured on a device: `python -m loadtest simulate batching`."""
