"""The HTTP API: routes of seqserve's own protocol."""
