"""The retry policy of gRPC clients that repeat a refused call practically at once."""

from __future__ import annotations

MOST_ATTEMPTS = 4
RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": MOST_ATTEMPTS,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
"""A part of a service configuration. With a back-off of a millisecond, calls of grpcio 1.85.1 never end, not even by their deadline."""
