"""Rectified flow: a network that moves noise to images, or to features behind a public front."""
