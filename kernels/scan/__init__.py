"""The kernels of the SRU, the QRNN and the minGRU, for CUDA and for the CPU: a scan over time, elementwise in the hidden units.
The families describe their layers to it; nothing here knows their weights."""
