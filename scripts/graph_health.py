"""The health of the import graph in one line, and the bounds that keep it.

    scripts/graph_health.py [CHECKOUT]

Reads every source file of our packages and runs none. Imports inside functions and under TYPE_CHECKING count.
`__init__.py` is no source file of its folder, and importing a module is not importing its packages.
Exits 1 if a figure is above its bound.
"""

import ast
import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

PACKAGES = {
    "edgekit_runtime": "device_runtime",
    "edgekit_host": "host",
    "edgekit_cli": "host",
    "edgekit_toolkit": "toolkit",
    "edgekit_offload": "offload",
    "edgekit_fleet": "fleet",
    "edgekit_hil": "hil",
}

MOST_FILES = 20
MOST_IMPORTS = 22
MOST_FILES_OF_FOLDER = {
    "edgekit_runtime": 6,
    # One operator, sensor or command a file: the list grows with what there is.
    "edgekit_runtime.commands": 30,
    "edgekit_runtime.power.sensors": 30,
    "edgekit_cli": 30,
    "edgekit_toolkit.tflite.ops": 30,
}

# Words that read as prose and tell a stranger nothing; none is a name or one of the words of a name.
BANNED = {"hear", "tell", "lay", "say", "lives", "tally", "given", "pace", "sparing", "keeping"}

# Words that are no names of variables and parameters: they say nothing about what the name holds.
FILLERS = {
    "asked",
    "came",
    "each",
    "found",
    "given",
    "got",
    "held",
    "kept",
    "known",
    "left",
    "made",
    "one",
    "ones",
    "place",
    "places",
    "rest",
    "said",
    "seen",
    "shown",
    "taken",
    "told",
    "took",
    "wanted",
    "way",
    "ways",
    "what",
    "who",
}
MOST_FILLERS = 0.005  # of a package's variables and parameters
PROGRAMS = ("scripts", "models", "examples")
Nodes: TypeAlias = list[ast.AST]


class Records(NamedTuple):
    """A table of records: outside its module nothing compares the name of one.

    Attributes:
        module: module or folder that holds the records.
        fields: of a record, all of which are stated.
        rooms: where a text that is such a name means the record.
    """

    module: str
    fields: frozenset[str]
    rooms: tuple[str, ...]


RECORDS = {
    "engine": Records("edgekit_runtime.engines", frozenset({"name", "file_format"}), ("edgekit_",)),
    "gate": Records(
        "edgekit_fleet.rollouts.gate_table",
        frozenset({"name", "sentence"}),
        (
            "edgekit_fleet.api.",
            "edgekit_fleet.console.",
            "edgekit_fleet.manager.",
            "edgekit_fleet.operations.",
            "edgekit_fleet.rollouts.",
            "edgekit_cli.fleet.",
        ),
    ),
    "objective": Records(
        "edgekit_runtime.offload.objectives",
        frozenset({"goal", "stages"}),
        ("edgekit_offload.", "edgekit_runtime.offload.", "edgekit_cli.offload."),
    ),
}


def parse(source: bytes, path: Path) -> Nodes:
    """Return the nodes of a file's syntax tree in the order of `ast.walk`."""
    nodes: Nodes = [ast.parse(source, path)]
    for node in nodes:  # it grows meanwhile
        nodes.extend(ast.iter_child_nodes(node))
    return nodes


def read_modules(checkout: Path) -> dict[str, Nodes]:
    """Return the nodes of each of our modules by its dotted name."""
    modules = {}
    for package, folder in PACKAGES.items():
        for path in (checkout / folder / package).rglob("*.py"):
            parts = path.relative_to(checkout / folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = parse(path.read_bytes(), path)
    return modules


def read_programs(checkout: Path, folders: Iterable[str], text: bytes = b"") -> dict[str, Nodes]:
    """Return the nodes of programs that are in no package and hold a text, by their folders and names."""
    return {
        ".".join(path.relative_to(checkout).with_suffix("").parts): parse(source, path)
        for folder in folders
        for path in (checkout / folder).rglob("*.py")
        if text in (source := path.read_bytes())
    }


def find_imports(modules: dict[str, Nodes]) -> dict[str, set[str]]:
    """Return which of our modules each module imports, wherever the import stands."""
    imports: dict[str, set[str]] = {}
    for module, nodes in modules.items():
        named: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    named.add(submodule if submodule in modules else node.module)
        imports[module] = (named & modules.keys()) - {module}
    return imports


def find_rings(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, largest first."""
    reached = {module: _reach(module, imports) for module in imports}
    rings = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports
        if module in reached[module]
    }
    return sorted((list(ring) for ring in rings), key=len, reverse=True)


def _reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for module in imports[waiting.pop()] - reached:
            reached.add(module)
            waiting.append(module)
    return reached


def find_large_folders(modules: Iterable[str], packages: set[str]) -> tuple[str, list[str]]:
    """Return the largest folder without a bound of its own, and a line for each folder above its bound."""
    counts = Counter(module.rpartition(".")[0] for module in modules if module not in packages)
    usual = {folder: count for folder, count in counts.items() if folder not in MOST_FILES_OF_FOLDER}
    largest = max(usual, key=lambda folder: usual[folder])
    faults = [
        f"{folder} holds {count} files, expected {MOST_FILES_OF_FOLDER.get(folder, MOST_FILES)} at most"
        for folder, count in sorted(counts.items())
        if count > MOST_FILES_OF_FOLDER.get(folder, MOST_FILES)
    ]
    return f"{largest} ({usual[largest]} files)", faults


def find_duplicate_classes(modules: dict[str, Nodes]) -> list[str]:
    """Return a line for each class name that one package defines in two modules."""
    modules_by_class: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for module, nodes in modules.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                modules_by_class[module.partition(".")[0], node.name].append(module)
    return [
        f"class {name} stands in {' and '.join(sorted(defining_modules))}"
        for (_package, name), defining_modules in sorted(modules_by_class.items())
        if len(defining_modules) > 1
    ]


def find_banned_names(modules: dict[str, Nodes]) -> list[str]:
    """Return a line for each name that a module gives and that holds a banned word."""
    faults = []
    for module, nodes in sorted(modules.items()):
        named = {name: line for name, line in _names(nodes) if _words(name) & BANNED}
        if _words(module.rpartition(".")[2]) & BANNED:
            named[module] = 1
        faults += [f"{module}:{line} is named {name!r}" for name, line in named.items()]
    return faults


def find_fillers(modules: dict[str, Nodes]) -> tuple[dict[str, float], list[str]]:
    """Return the share of fillers among the variables and parameters of each package, and a line for each."""
    counts: Counter[str] = Counter()
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for module, nodes in sorted(modules.items()):
        package = module.partition(".")[0]
        for node in nodes:
            is_variable = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_variable or isinstance(node, ast.arg):
                name = getattr(node, "arg", getattr(node, "id", getattr(node, "attr", "")))
                counts[package] += 1
                if name.strip("_").lower() in FILLERS:
                    lines[package].append(f"{module}:{node.lineno} is named {name!r}")
    shares = {package: len(lines[package]) / count for package, count in counts.items()}
    faults = [line for package, share in shares.items() if share > MOST_FILLERS for line in lines[package]]
    return shares, faults


def find_hidden_imports(modules: dict[str, Nodes]) -> list[str]:
    """Return a line for each import of a module of ours by a text, which no contract sees."""
    return [
        f"{module}:{node.lineno} imports '{node.args[0].value}' by a text; use an import statement"
        for module, nodes in sorted(modules.items())
        for node in nodes
        if isinstance(node, ast.Call)
        and _last_name(node.func) in ("import_module", "__import__")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith(tuple(PACKAGES))
    ]


def find_private_patches(programs: dict[str, Nodes]) -> list[str]:
    """Return a line for each private name that a test patches: its module must offer it, or a parameter."""
    return [
        f"{module}:{node.lineno} patches the private name '{name}'"
        for module, nodes in sorted(programs.items())
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"
        for argument in node.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if (name := argument.value.rpartition(".")[2]).startswith("_") and not name.endswith("__")
    ]


def find_record_cases(modules: dict[str, Nodes]) -> list[str]:
    """Return a line for each comparison with the name of a record, and each table by such names."""
    faults = []
    cases = {module: list(_find_cases(nodes)) for module, nodes in sorted(modules.items())}
    for kind, records in RECORDS.items():
        own = {name: nodes for name, nodes in modules.items() if name.startswith(records.module)}
        record_names = {name for nodes in own.values() for name in _find_record_names(nodes, records.fields)}
        faults += [
            f"{module}:{line} has a case for the {kind} '{name}'; ask its record in {records.module}"
            for module, own_cases in cases.items()
            if module.startswith(records.rooms) and module not in own
            for line, name in own_cases
            if name in record_names
        ]
    return faults


def _find_record_names(nodes: Nodes, fields: frozenset[str]) -> Iterator[str]:
    """Yield the names of records, from their field `name` or their keys in a table."""
    for node in nodes:
        if isinstance(node, ast.Call):
            stated = {keyword.arg: keyword.value for keyword in node.keywords}
            names = [stated.get("name")] if fields <= stated.keys() else []
        elif isinstance(node, ast.Dict):
            values = [value for value in node.values if isinstance(value, ast.Call)]
            are_records = values and all(fields <= {word.arg for word in call.keywords} for call in values)
            names = node.keys if are_records else []
        else:
            continue
        yield from (name.value for name in names if isinstance(name, ast.Constant))


def _find_cases(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the texts with which something is compared, and the keys of tables, with their lines."""
    for node in nodes:
        cases: list[ast.expr | None]
        if isinstance(node, ast.Compare):
            cases = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            cases = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            cases = [node.value]
        else:
            continue
        texts = {
            part.value
            for case in cases
            if isinstance(case, ast.Constant | ast.Tuple | ast.Set | ast.List)
            for part in ast.walk(case)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        yield from ((node.lineno, text) for text in sorted(texts))


def _last_name(node: ast.expr) -> str:
    """Return `c` of `a.b.c` or of `c`; nothing of other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _names(nodes: Nodes) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower()))


def main(checkout: Path) -> int:
    """Print the one line and the faults; return whether there are any."""
    gc.disable()  # nodes stay to the end
    modules = read_modules(checkout)
    parents = {module.rpartition(".")[0] for module in modules}
    packages = {module for module in modules if module in parents or module in PACKAGES}
    imports = find_imports(modules)
    rings = find_rings(imports)
    largest, large = find_large_folders(modules, packages)
    busiest = max(imports, key=lambda module: len(imports[module]))
    faults = {
        "folders": large,
        "imports": [
            f"{module} imports {len(named)} modules of ours, expected {MOST_IMPORTS} at most"
            for module, named in sorted(imports.items())
            if len(named) > MOST_IMPORTS
        ],
        "rings": [f"{module} is in a ring of {len(ring)}" for ring in rings for module in ring],
        "classes": find_duplicate_classes(modules),
        "names": find_banned_names(modules),
        "hidden imports": find_hidden_imports(modules),
        "records": find_record_cases(modules),
        "patches": find_private_patches(read_programs(checkout, ("tests",), b"setattr")),
    }
    shares, faults["fillers"] = find_fillers({**modules, **read_programs(checkout, PROGRAMS)})
    print(
        f"graph: {len(modules)} modules; largest folder {largest};"
        f" highest fan-out {busiest} ({len(imports[busiest])});"
        f" {len(rings)} rings ({len(faults['rings'])} files);"
        f" {len(faults['classes'])} duplicate class names; {len(faults['names'])} banned names;"
        f" fillers {', '.join(f'{package} {share:.1%}' for package, share in sorted(shares.items()))}"
    )
    for lines in faults.values():
        print(*lines, sep="\n", end="\n" if lines else "")
    return any(faults.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent))
