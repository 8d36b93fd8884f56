"""The HTTP/1.1 server: listeners, connections, requests and responses. It knows nothing of models."""
