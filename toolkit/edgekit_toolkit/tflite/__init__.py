"""ONNX to TFLite without TensorFlow: our own writer on the flatbuffer schema that ai-edge-litert ships.

`convert.convert` is the way in; `check.convert_checked` compares the result with onnxruntime as well. The way
of a model: `prepare` (sizes bound, constants computed) -> `view` (a plain graph) -> `fusion` (nodes that one
TFLite operator computes) -> `layout` (in which order of axes each tensor is held) -> `ops/` (one file a
family) -> `writer` (the file). Decisions: docs/adr/0008-own-tflite-writer.md.
"""
