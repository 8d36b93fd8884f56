"""The importer for `.tflite` files, which are checked and then run once in a child process."""
