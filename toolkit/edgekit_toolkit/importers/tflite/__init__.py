"""`.tflite` files: read whole, screened, and run once in a process of their own."""
