"""Shows the name of the running model in the stack trace that is logged when an engine crashes."""

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def name_frame(function: Callable[_Parameters, _Result], name: str) -> Callable[_Parameters, _Result]:
    """Return a copy of `function` with another name.

    After a crash such as SIGSEGV, `faulthandler` prints only function names. The new name shows which model
    was running.

    Args:
        function: A plain function at the top level of a module.
        name: The name to show in the stack trace.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is no plain function")
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
