"""The REST API and the WebSocket of the service: one module per group of routes."""
