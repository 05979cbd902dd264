"""The frontend process: every API of the service. The APIs translate requests, and inference.py runs them."""
