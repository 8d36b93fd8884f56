"""The service as any client of the Open Inference Protocol sees it: here NVIDIA's tritonclient, over TCP.

Usage: triton_session.py HOST:PORT MODEL   (needs `pip install 'tritonclient[http]'`)
"""

import sys

import numpy as np
import tritonclient.http as triton


def main() -> None:
    """Ask what there is, run the model, and look at its statistics."""
    address, model = sys.argv[1:3]
    client = triton.InferenceServerClient(address)
    print("ready:", client.is_model_ready(model))
    (spec,) = client.get_model_metadata(model)["inputs"]
    shape = [size if size > 0 else 1 for size in spec["shape"]]
    values = np.zeros(shape, triton.triton_to_np_dtype(spec["datatype"]))
    tensor = triton.InferInput(spec["name"], shape, spec["datatype"])
    tensor.set_data_from_numpy(values, binary_data=True)
    result = client.infer(model, [tensor])
    for output in result.get_response()["outputs"]:
        print(output["name"], result.as_numpy(output["name"]).shape)
    (line,) = client.get_inference_statistics(model)["model_stats"]
    print("requests so far:", line["inference_stats"]["success"]["count"])
    client.close()


if __name__ == "__main__":
    main()
