"""A sampler that learns how trials differ from what was predicted: Gaussian processes on log residuals."""
