"""The LiteRT backend: `.tflite` models on the CPU."""
