"""The command line as a whole: lazy commands, exit codes, errors as text and as JSON."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.toolkit.cases import cases

from edgekit_cli import lazy_commands
from edgekit_cli.cli import COMMANDS, cli, main
from edgekit_runtime import __version__, errors
from edgekit_runtime.errors import EdgekitError, RequestError, SignatureError

EDGEKIT = [sys.executable, "-m", "edgekit_cli"]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
HEAVY = {"numpy", "onnx", "onnxruntime", "onnxoptimizer", "rich", "securesystemslib", "cryptography"}


@pytest.fixture
def add_command() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Registers a command `probe` that accepts --json and calls the given function."""

    def add(action: Callable[[], object]) -> None:
        @click.command("probe")
        @click.option("--json", "as_json", is_flag=True)
        def probe(as_json: bool) -> None:
            action()

        cli.add_command(probe)

    yield add
    cli.commands.pop("probe", None)


def raiser(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def error_classes() -> list[type[EdgekitError]]:
    """The error tree; a class defined elsewhere is a special case of one of these, with its code."""
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, EdgekitError)]


def run_edgekit(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*EDGEKIT, *arguments], capture_output=True, text=True, check=False, env=ENVIRONMENT | environment
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"]])
def test_help_version_and_completion_import_no_heavy_module(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom edgekit_cli.cli import main\n"
        f"assert main({arguments!r}) == 0\nprint(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    imported = set(result.stderr.split())
    assert "click" in imported
    assert not imported & HEAVY


@cases("name", cli.commands)
def test_every_listed_command_has_a_module_that_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"{name} [OPTIONS]" in result.stdout


def test_help_lists_the_installed_commands_in_order_of_first_use() -> None:
    section = CliRunner().invoke(cli, ["--help"]).stdout.split("Commands:\n")[1].split("\n\n")[0]
    listed = re.findall(r"^  (\S+)", section, flags=re.MULTILINE)
    assert listed == [name for name in COMMANDS if name in cli.commands]


def test_command_without_module_is_not_offered() -> None:
    offered = lazy_commands.lazy_commands({"completion": "here", "teleport": "no such module"}, "edgekit_cli")
    assert [command.name for command in offered] == ["completion"]


def test_version_option_prints_the_version_of_the_package() -> None:
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"edgekit {__version__}\n"


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teleport"]) == 2
    assert "No such command 'teleport'" in capsys.readouterr().err


@pytest.mark.parametrize("error_class", error_classes(), ids=lambda c: c.__name__)
def test_error_of_ours_gives_its_exit_code_and_one_message(
    error_class: type[EdgekitError],
    add_command: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = "model.onnx: expected a, got b"
    add_command(raiser(RequestError(400, message) if error_class is RequestError else error_class(message)))
    assert main(["probe"]) == error_class.exit_code
    captured = capsys.readouterr()
    assert captured.err == "edgekit: model.onnx: expected a, got b\n"
    assert captured.out == ""


def test_error_with_json_prints_its_type_code_and_data_on_stdout(
    add_command: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(raiser(SignatureError("signed by a stranger", key_id="ab12")))
    assert main(["probe", "--json"]) == SignatureError.exit_code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {
            "type": "SignatureError",
            "message": "signed by a stranger",
            "exit_code": SignatureError.exit_code,
            "key_id": "ab12",
        }
    }
    assert captured.err == "edgekit: signed by a stranger\n"


def test_usage_error_with_json_is_json_too(
    add_command: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(lambda: None)
    assert main(["probe", "--json", "--no-such-option"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 2
    assert "--no-such-option" in error["message"]


def test_interrupt_ends_with_130_and_no_traceback(
    add_command: Callable[[Callable[[], object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(raiser(KeyboardInterrupt()))
    assert main(["probe"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_unexpected_exception_is_not_hidden(add_command: Callable[[Callable[[], object]], None]) -> None:
    add_command(raiser(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["probe"])


def test_command_that_exits_with_a_code_passes_it_on(
    add_command: Callable[[Callable[[], object]], None],
) -> None:
    add_command(lambda: click.get_current_context().exit(5))
    assert main(["probe"]) == 5


def test_closed_output_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        result = subprocess.run(
            [*EDGEKIT, "--help"],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
    assert result.returncode == 141
    assert result.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_edgekit_for_the_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_EDGEKIT_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_completion_script_as_json_is_the_same_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert main(["completion", "bash", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shell"], found["script"].strip()) == ("bash", script.strip())


@cases("name", [name for name in cli.commands if name not in ("device", "fleet", "hil", "keys", "offload")])
def test_every_command_offers_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(cli, [name, "--help"]).stdout


def test_completion_of_the_first_word_offers_the_commands() -> None:
    result = run_edgekit(_EDGEKIT_COMPLETE="bash_complete", COMP_WORDS="edgekit comp", COMP_CWORD="1")
    assert result.stdout == "plain,completion\n"


def test_completion_inside_a_command_offers_its_values() -> None:
    result = run_edgekit(_EDGEKIT_COMPLETE="bash_complete", COMP_WORDS="edgekit completion ", COMP_CWORD="2")
    assert result.stdout.split() == ["plain,bash", "plain,zsh", "plain,fish"]


def test_exit_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "exit-codes.md").read_text()
    undocumented = [
        f"{c.exit_code} {c.__name__}"
        for c in error_classes()
        if f"| {c.exit_code} |" not in page or f"`{c.__name__}`" not in page
    ]
    assert undocumented == []
