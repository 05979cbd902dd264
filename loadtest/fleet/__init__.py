"""Many replicas behind a proxy, simulated: sessions by consistent hashing, failures, autoscaling and cost.

`python -m loadtest simulate fleet` runs it. The service figures come from loadtest/results; nothing here measures.
"""
