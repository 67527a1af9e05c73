"""Pure: what layers keep, and how they are laid out over one pool of blocks. No clock, device or file."""
