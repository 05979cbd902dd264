"""The CUDA kernels of the SRU and the QRNN: a scan over time, elementwise in the hidden units. The families describe their layers to
it; nothing here knows their weights."""
