"""Names of models in the stack that is written to the log when an engine ends the process."""

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def name_frame(function: Callable[_Parameters, _Result], name: str) -> Callable[_Parameters, _Result]:
    """Return a copy of `function` whose frames bear `name`, at no cost when it is called.

    After a signal like SIGSEGV nothing can look up what ran; `faulthandler` writes the names of frames.

    Args:
        function: a plain function at the top level of a module.
        name: the name that replaces the function's.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is no plain function")
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
