"""Names of models in the stack that is written to the log when an engine ends the process."""

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def name_frame(function: Callable[_Parameters, _Result], name: str) -> Callable[_Parameters, _Result]:
    """Return a copy of `function` under another name. Calls cost no more than before.

    At a crash such as SIGSEGV, `faulthandler` prints function names only, so the name says what ran.

    Args:
        function: a plain function at the top level of a module.
        name: text for the stack trace.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is no plain function")
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
