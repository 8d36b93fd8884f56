"""ONNX nodes that one TFLite operator computes are joined."""
