"""Metrics: PSNR and SSIM, ROC, distances between sets of images, perceptual distance, and the networks they need.

A leaf package: it imports errors, files, messages, randomness and settings, and no other room.
"""
