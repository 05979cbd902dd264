"""A load generator in a separate process, lean enough to share two cores with the measured server.

`python -m loadtest.generator` reads a job from a file and writes its result to another. It imports no client library: requests are bytes
that are prepared before the clock starts, and of an answer it reads only the status, the length and the body.
"""
