"""The Open Inference Protocol over gRPC, on an HTTP/2 of our own; see docs/adr/0037-grpc.md."""
