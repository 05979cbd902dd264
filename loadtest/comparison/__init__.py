"""The comparison with other model servers: which servers, which requests, and how the results are shown."""
