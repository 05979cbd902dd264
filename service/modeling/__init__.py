"""What a model is: its folder, its layers, its head, its tokenizer."""
