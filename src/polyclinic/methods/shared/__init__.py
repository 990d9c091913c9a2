"""What several methods say: local training, averaging, generative replay, buffers, utility."""
