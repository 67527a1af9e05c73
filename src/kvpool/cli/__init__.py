"""The command line: one file a command, and how results look."""
