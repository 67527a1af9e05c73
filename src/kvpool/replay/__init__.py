"""Real traffic through a real cache: trace readers, a workload generator, the simulator, and the report."""
