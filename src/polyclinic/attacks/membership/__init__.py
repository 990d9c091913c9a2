"""Membership inference: was this image in the training set?"""
