"""The service on a Ray cluster: docs/ray.md. Only `app`, `directory` and `traffic` need Ray; the rest is tested without it."""
