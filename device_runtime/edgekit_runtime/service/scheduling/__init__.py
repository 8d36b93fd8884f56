"""Schedules calls with queues, batches and threads, and caches responses."""
