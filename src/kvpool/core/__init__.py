"""The pure state machine: no clock, no randomness, no threads, no tensors."""
