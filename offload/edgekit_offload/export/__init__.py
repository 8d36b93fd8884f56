"""The server's half of a package for other servers: Triton, Kubernetes, KServe, replicas behind HAProxy."""
