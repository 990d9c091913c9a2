"""A released model for other programs: ONNX, TorchScript or a MONAI bundle, with its preparation and its card."""
