"""Model files, and predictions for images."""
