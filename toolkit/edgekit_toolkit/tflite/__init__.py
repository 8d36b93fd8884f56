"""ONNX to TFLite without TensorFlow: our own writer on the flatbuffer schema that ai-edge-litert ships.

`convert.convert` is the entry point; `check.convert_checked` also compares the result with onnxruntime. The
steps: `prepare` (binds sizes, computes constants) -> `view` (a plain graph) -> `fusion` (joins nodes that one
TFLite operator computes) -> `layout` (chooses the order of axes of each tensor) -> `ops/` (writes operators,
one file for each family) -> `writer` (writes the file). Decisions: docs/adr/0008-own-tflite-writer.md.
"""
