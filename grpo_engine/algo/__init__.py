"""The mathematics: tensors in, tensors out. No model, no device, no logging."""
