"""The operating system: files, paths, child processes, and lack of memory or descriptors."""
