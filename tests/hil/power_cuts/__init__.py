"""Power cuts on a real file system: any instant of a recorded run can be replayed and mounted."""
