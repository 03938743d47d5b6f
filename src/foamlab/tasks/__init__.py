"""What a model is fine-tuned for: rows with labels, what is minimized, and how predictions are judged."""
