"""Quantization of `.tflite` models with ai-edge-quantizer."""
