"""The Open Inference Protocol over gRPC, on our own HTTP/2 implementation (docs/adr/0037-grpc.md)."""
