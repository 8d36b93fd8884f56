"""Exports the server models of a package to Triton, Kubernetes, KServe, and replicas behind HAProxy."""
