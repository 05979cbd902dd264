"""The Open Inference Protocol over REST and gRPC."""
