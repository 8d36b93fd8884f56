"""Parses the options of `edgekit package`."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import RecipeError
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.system.own_process import count_cores
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.importers.file_kind import is_tflite
from edgekit_toolkit.importers.local_sources import LocalModel, find_model, is_named
from edgekit_toolkit.measurement.brevity import is_brief
from edgekit_toolkit.packaging.attachments import read_labels, read_preprocessing
from edgekit_toolkit.packaging.next_version import FIRST_VERSION
from edgekit_toolkit.pipeline.engine_tournament import engines_here
from edgekit_toolkit.pipeline.replay import read_earlier
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.untimed_forms import find_untimed_support
from edgekit_toolkit.quantize.forms import EarlierModel, Form
from edgekit_toolkit.samples.media.classes import find_box_names, find_class_names
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import find_user_targets, load_target
from edgekit_toolkit.targets.spec import Target
from edgekit_toolkit.tasks.proposal import AUTO, parse_task

# As the manifest takes them.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
MAX_SIZE = 2**31 - 1


def find_source(model: Path, python: Path | None, out: Path) -> LocalModel:
    """Return the file of a model. If `python` is not None, this interpreter exports the model to `out`.

    Raises:
        ModelError: MODEL is malformed or missing, a link leads out of its folder, or the export fails.
    """
    source = find_model(str(model))
    if python is None:
        return source
    from edgekit_toolkit.importers.foreign_python import export_by

    return replace(source, path=export_by(python, source.path, out))


def read_request(model: Path, options: Mapping[str, Any]) -> Request:
    """Parse the options of `edgekit package`, which are given by the names of their arguments.

    Raises:
        click.UsageError: An option is missing or malformed.
        TargetError: There is no such target.
        DataError: Labels, preprocessing or task cannot be used.
        RecipeError: The recipe of `--like` cannot be used.
    """
    if options["target"] is None:
        raise click.UsageError("Missing option '--target'; `edgekit targets` lists them.")
    budget = parse_budget(options["budget"])
    target = load_target(options["target"], [find_user_targets()])
    if options["power_mode"] is not None:
        target = target.in_mode(options["power_mode"])
    if options["task"] != AUTO:
        parse_task(options["task"])  # a slip is found before the model is read
    labels = None if options["labels"] is None else read_labels(options["labels"])
    paths = [path for path in (options["evaluation"], options["calibration"]) if path is not None]
    folder_names = () if labels is not None else find_class_names(paths)
    class_names = folder_names or (() if labels is not None else find_box_names(paths))
    like, earlier = (None, None) if options["like"] is None else read_earlier(options["like"])
    for kind in options["also"]:
        find_untimed_support(kind, target)
    backend = _backend(options["backend"] or (None if like is None else like.backend), target, model)
    return Request(
        model=model,
        target=target,
        budget=budget,
        name=_name(model, options),
        version=options["version"] or FIRST_VERSION,
        calibration=options["calibration"],
        evaluation=options["evaluation"],
        metric=options["metric"],
        task=options["task"],
        batch=options["batch"],
        dims=_dims(options["dims"]),
        fixed=_fixed(options["fixed"]),
        states=_states(options["states"]),
        labels="".join(f"{name}\n" for name in class_names) or labels,
        labels_from_folders=bool(folder_names),
        preprocessing=None
        if options["preprocessing"] is None
        else read_preprocessing(options["preprocessing"]),
        threads=options["threads"] or max(1, min(4, count_cores())),
        thread_counts=() if options["threads"] else _thread_counts(target, backend),
        search_s=options["search_s"],
        backend=backend,
        variants=options["variants"],
        also=options["also"],
        strict=options["strict"],
        like=None if like is None else _form_for_other_weights(like.form, earlier),
    )


def _thread_counts(target: Target, backend: str) -> tuple[int, ...]:
    """Return the thread counts to time: 1 and the target's cores, limited to the cores here, or none."""
    most = min(int(target.cpu.cores.value), count_cores())
    if most == 1 or is_brief("times") or (backend != "auto" and find_support(backend).on_gpu):
        return ()
    return (1, most)


def _form_for_other_weights(form: Form, earlier: EarlierModel | None) -> Form:
    """Return a form without the codes of earlier weights, which would replace the new weights.

    Raises:
        RecipeError: The form has fewer channels than the model.
    """
    if form.compression is not None and form.compression.channels:
        raise RecipeError(
            "--like: the earlier package lacks channels that only its own weights allow to prune; make this"
            " package without --like"
        )
    return replace(form, earlier=earlier, compression=None)


def _backend(requested: str | None, target: Target, model: Path) -> str:
    """Return the requested engine, or the target's preferred engine among those packaged for here."""
    engines = target.backend.names
    if requested is not None and requested not in {*engines, "auto"}:
        raise click.BadParameter(
            f"{target.name} runs {' and '.join(engines)}, not {requested}", param_hint="--backend"
        )
    if is_tflite(model):
        readers = [name for name in engines if find_engine(name).file_format == "tflite"]
        if not readers or requested not in (None, "auto", *readers):
            raise click.BadParameter(
                f"{model.name} is a .tflite model, which LiteRT runs alone; {target.name} runs"
                f" {' and '.join(engines)}. Give the model as ONNX.",
                param_hint="--backend",
            )
        return readers[0]
    on_gpu = [name for name in engines if find_engine(name).on_gpu]
    if on_gpu and requested in (None, "auto"):
        return on_gpu[0]  # its tournament runs on the device: edgekit-device tournament
    if requested is not None:
        return requested
    here = engines_here(target)
    if len(here) > 1 and find_support(engines[0]).competes:
        return "auto"
    return next((name for name in engines if name in here), engines[0])


def command_line(ctx: click.Context) -> str:
    """Return the typed command for reports, with options in the order of the help.

    Paths are replaced by file names, so that reports do not show the names of folders and users.
    """
    parts = ["edgekit", "package", _without_folders(ctx.params["model"])]
    for option in ctx.command.params:
        name = option.name or ""
        is_stated = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not is_stated or not isinstance(option, click.Option):
            continue
        value = ctx.params[name]
        if option.is_flag:
            parts.append(option.opts[0])
            continue
        for item in value if option.multiple else [value]:
            # A target and a metric may be the user's files.
            is_path = isinstance(item, Path) or name in {"target", "metric"}
            parts += [option.opts[0], _without_folders(item) if is_path else str(item)]
    return shlex.join(parts)


def _without_folders(path: Path | str) -> str:
    return str(path) if is_named(str(path)) else Path(path).name or str(path)


def _dims(items: tuple[str, ...]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for item in items:
        name, equals, size = item.rpartition("=")
        if not equals or not name or not re.fullmatch("[0-9]{1,10}", size) or int(size) > MAX_SIZE:
            raise click.BadParameter(
                f"{item!r}: expected NAME=SIZE with a size from 0 to {MAX_SIZE}", param_hint="--dim"
            )
        if dims.setdefault(name, int(size)) != int(size):
            raise click.BadParameter(f"{name!r} is given as {dims[name]} and as {size}", param_hint="--dim")
    return dims


def _fixed(items: tuple[str, ...]) -> dict[str, JsonValue]:
    values: dict[str, JsonValue] = {}
    for item in items:
        name, equals, text = item.rpartition("=")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not equals or not name or not isinstance(value, (bool, int, float, list)):
            raise click.BadParameter(
                f"{item!r}: expected NAME=VALUE with a number, or with nested lists of numbers in JSON",
                param_hint="--fix",
            )
        if name in values:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--fix")
        values[name] = value
    return values


def _states(items: tuple[str, ...]) -> dict[str, str]:
    states: dict[str, str] = {}
    for item in items:
        output, equals, name = item.partition("=")
        if not equals or not output or not name:
            raise click.BadParameter(f"{item!r}: expected OUTPUT=INPUT", param_hint="--state")
        if output in states:
            raise click.BadParameter(f"output {output!r} is given twice", param_hint="--state")
        states[output] = name
    return states


def _name(model: Path, options: Mapping[str, Any]) -> str:
    name = options["name"] or re.sub(r"[^A-Za-z0-9._-]+", "_", model.stem)[:64].strip("._-") or "model"
    for option, text in (("--name", name), ("--version", options["version"])):
        if text is not None and not _NAME.fullmatch(text):
            raise click.BadParameter(
                f"{text!r}: expected 1 to 64 letters, digits or '_.+-', starting with a letter or digit",
                param_hint=option,
            )
    return str(name)
