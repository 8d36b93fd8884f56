"""Exports the server's part of a package to Triton, Kubernetes, KServe, and replicas behind HAProxy."""
