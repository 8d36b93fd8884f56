"""Converts ONNX to TFLite without TensorFlow, with the flatbuffer schema of ai-edge-litert.

The entry point is `convert.convert`. `check.convert_checked` also compares the result with onnxruntime. The
conversion has these steps:

    prepare   binds sizes and computes constants
    view      makes a simple graph
    fusion    joins nodes that one TFLite operator computes
    layout    chooses the order of axes of each tensor
    ops       writes operators, in one file per family
    writer    writes the file

The decisions are in docs/adr/0008-own-tflite-writer.md.
"""
