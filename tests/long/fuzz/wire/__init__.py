"""A fuzzer of a running service over raw sockets: mutated HTTP requests, WebSocket frames and HTTP/2 frames of gRPC.

`python -m tests.long.fuzz.wire --requests 2000000`, runs it; tests/long/test_wire_fuzz.py runs a part.
"""
