"""The tracer: makes OpenTelemetry spans of the requests that frontends traced, and exports them."""
