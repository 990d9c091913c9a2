"""Training at a site: the loop, optimisers, augmentation, CUDA graphs, DP-SGD.

Imports federation, privacy, data, tasks and models."""
