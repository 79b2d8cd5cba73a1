"""What a model must be: valid, trainable in part, and apart for each of its samples."""
