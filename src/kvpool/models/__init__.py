"""What a model is: a config.json to what its layers keep, to its weights, and to what fits on devices."""
