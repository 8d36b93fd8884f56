"""Power cuts on a real file system: one recorded run, of which any instant is replayed and mounted."""
