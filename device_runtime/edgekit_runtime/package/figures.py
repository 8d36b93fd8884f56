"""Names of the entries in a manifest's `figures` that the toolkit writes and the device reads."""

from typing import Final

RUN_MEMORY_FIGURE: Final = "run_bytes_per_input_byte"
"""Key in the figure `memory_estimate`: bytes of inputs, activations and outputs per input byte."""

INTEGER_DIVISION_FIGURE: Final = "integer_division_by_inputs"
"""Whether the model divides integers by input values, which can crash the process on some processors."""

SUBMODEL_BYTES_FIGURE: Final = "submodel_bytes"
"""The size of a submodel's graph and of the weights that it reads."""

ANSWER_OUTPUT_FIGURE: Final = "answer_output"
"""The name of the first output if it is an answer as JSON. A canary compares its labels and boxes."""
