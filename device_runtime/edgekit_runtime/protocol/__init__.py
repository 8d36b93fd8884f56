"""The Open Inference Protocol v2 over HTTP, in bytes and numpy arrays: both sides of it, without sockets.

Source: KServe Open Inference Protocol v2 (HTTP/REST); Triton's extensions binary_tensor_data, shared_memory,
    schedule_policy (`priority`, `timeout`) and model_repository.
"""
