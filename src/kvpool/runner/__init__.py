"""A real model on the cache's blocks: torch and transformers, where they are installed."""
