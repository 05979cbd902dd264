"""What the SRU and the QRNN have in common on a GPU: cells that wait for nothing but their own past."""
