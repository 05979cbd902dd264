"""The comparison with other model servers: which servers, which requests, which goals, and how the results are shown."""
