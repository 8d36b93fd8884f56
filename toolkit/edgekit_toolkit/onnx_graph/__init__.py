"""ONNX graphs: index, traversal, shapes and specs."""
