"""Single requests in, batches out."""
