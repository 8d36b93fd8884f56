"""When and where a call runs: queue, batches, threads, and the response cache."""
