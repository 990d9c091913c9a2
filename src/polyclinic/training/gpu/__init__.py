"""Training on a GPU: steps recorded as CUDA graphs, and the networks of many sites stacked as one."""
