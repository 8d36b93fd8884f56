"""Names of the entries in a manifest's `figures` that the toolkit writes and the device reads."""

from typing import Final

RUN_MEMORY_FIGURE: Final = "run_bytes_per_input_byte"
"""In the figure `memory_estimate`: bytes of inputs, activations and outputs together, for each input byte."""

INTEGER_DIVISION_FIGURE: Final = "integer_division_by_inputs"
"""Whether the model divides integers by values of its inputs, which ends the process on some processors."""

SUBMODEL_BYTES_FIGURE: Final = "submodel_bytes"
"""Of a submodel that is seen as the model: size of its graph and of the weights that it reads."""

ANSWER_OUTPUT_FIGURE: Final = "answer_output"
"""Name of the first output if it holds an answer as JSON, whose labels and boxes a canary compares."""
