"""What the notebooks stand on: workloads, timing, results, tables and plots. The ops never import it."""
