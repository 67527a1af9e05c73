"""The worker that computes a real model: its weights, and the memory that block ids point into."""
