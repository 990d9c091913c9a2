"""Metrics: image quality, ROC, distances between sets of images, perceptual distance, and the networks they need.

A leaf package: it imports errors, randomness and settings, and no other room."""
