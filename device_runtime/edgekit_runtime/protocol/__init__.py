"""The client and server side of the Open Inference Protocol v2 over HTTP, without sockets.

Source: KServe Open Inference Protocol v2 (HTTP/REST), and Triton's extensions binary_tensor_data,
shared_memory, schedule_policy (`priority`, `timeout`) and model_repository.
"""
