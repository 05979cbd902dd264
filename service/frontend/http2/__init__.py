"""HTTP/2 (RFC 9113) on the event loop: frames, header blocks, streams, flow control and limits. Nothing here knows gRPC."""
