"""A released model for other programs: ONNX, TorchScript or a MONAI bundle, with its preparation and its card.

One file a format, one for what lies beside the model, one for the check that both say the same.
"""
