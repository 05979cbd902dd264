"""One device: turns in, encodings out."""
