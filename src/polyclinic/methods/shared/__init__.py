"""Parts that several methods share: local training, averaging, generative replay, buffers, utility."""
