"""The latency of one step of one stream, host to host."""
