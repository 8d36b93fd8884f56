"""Quantization of ONNX models: Q/DQ nodes and stored weights."""
