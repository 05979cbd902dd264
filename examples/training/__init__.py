"""What the training scripts share: data, encoders, the training loop, cards, and the table of results."""
