"""The one runner of requests: from a decoded body to the reply, for every API."""
