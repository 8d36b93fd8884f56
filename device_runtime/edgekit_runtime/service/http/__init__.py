"""The HTTP/1.1 server: listeners, connections, requests and responses. It does not depend on models."""
