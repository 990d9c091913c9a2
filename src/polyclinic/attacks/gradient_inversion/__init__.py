"""Gradient inversion: images whose gradients are those that a site sent."""
