"""What is learned of a model before it serves."""
