"""The TPU and the GPU compiler, which need no device, on complete steps."""
