"""Exports the tails of a package to Triton, Kubernetes, KServe, and replicas behind HAProxy."""
