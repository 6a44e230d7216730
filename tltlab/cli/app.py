"""The `tltlab` command: finds its commands by entry point, so a missing extra costs only the commands that need it.

A command is loaded when it is called; the overview has the first lines of their helps without loading them.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points, metadata, requires, version
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from tltlab.console import JSON, command_group, progress, running, sigterm_as_interrupt
from tltlab.errors import ConfigError, TltlabError, did_you_mean, disk_full, one_line

GROUP = "tltlab.commands"
_INTERRUPTED = 130
_COMPLETE = "_TLTLAB_COMPLETE"
"""Set by the shell that completes a command line, as Typer names it."""
_BROUGHT_BY = {"zmq": "pyzmq", "torch": "vllm", "tokenizers": "transformers", "huggingface_hub": "transformers"}
"""The requirement that a module comes with, where it has another name."""


def click_command(name: str) -> Any:
    """Return a command as Typer has it, with its parameters and its subcommands.

    Raises ConfigError for a name that is unknown, and for a command whose extra is not installed.
    """
    import typer
    from typer.main import get_command

    commands = _commands()
    if name not in commands:
        raise ConfigError(
            f"no command named {name!r}{did_you_mean(name, commands)}; there are: {', '.join(sorted(commands))}"
        )
    try:
        target = commands[name].load()
    except ModuleNotFoundError as error:
        raise _missing_extra(error) from error
    command = get_command(target) if isinstance(target, typer.Typer) else _command(target)
    for each in getattr(command, "commands", {name: command}).values():
        each.params.append(_json_option())
    return command


def _command(function: Callable[..., None]) -> Any:
    from typer.main import get_command

    app = command_group(help="")
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(function)
    return get_command(app)


def _json_option() -> Any:
    """The option of every command for machines, which `console.emit` obeys."""
    import typer

    about = "Print one JSON object on standard output and nothing else there."

    def asked(json: bool = typer.Option(False, JSON, help=about)) -> None: ...

    (option,) = _command(asked).params
    option.expose_value = False
    return option


def command_names() -> list[str]:
    """The commands that are installed, in order."""
    return sorted(_commands())


def _group() -> Any:
    """Return all commands as a group of Typer's that loads a command when it is called or its options are completed."""
    from typer.core import TyperCommand, TyperGroup
    from typer.main import get_install_completion_arguments

    class Lazy(TyperCommand):
        def get_short_help_str(self, limit: int = 45) -> str:
            return _words().get(str(self.name), "")

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            command = click_command(str(self.name))
            if not gc.isenabled():  # as `main` left it: modules stay, so no collection needs to look at them
                gc.freeze()
                gc.enable()
            return command.make_context(info_name, args, parent, **extra)

    class Commands(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return command_names()

        def get_command(self, ctx: Any, cmd_name: str) -> Lazy:
            return Lazy(cmd_name)

    return Commands(params=[*get_install_completion_arguments()], rich_markup_mode=None)


@cache
def _commands() -> dict[str, EntryPoint]:
    # Reads the metadata of every package that is installed.
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def _words() -> dict[str, str]:
    """Return the purposes of the commands."""
    import tomllib

    purposes: dict[str, str] = tomllib.loads((files("tltlab.cli") / "commands.toml").read_text("utf-8"))
    return purposes


def _missing_extra(error: ModuleNotFoundError) -> TltlabError:
    """The sentence that names the extra which brings a missing module; raises `error` where none of tltlab's does."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    module = (error.name or "").split(".")[0]
    package = canonicalize_name(_BROUGHT_BY.get(module, module))
    for extra in metadata("tltlab").get_all("Provides-Extra") or ():
        for need in map(Requirement, requires("tltlab") or ()):
            if canonicalize_name(need.name) == package and need.marker and need.marker.evaluate({"extra": extra}):
                otherwise = " (or 'tltlab[runtime-cpu]' without CUDA)" if extra == "runtime" else ""
                hint = f"pip install 'tltlab[{extra}]'{otherwise}"
                return ConfigError(f"this needs {module}, which is not installed: {hint}")
    raise error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 1 the work failed, 2 the input was wrong, 130 interrupted.

    SIGTERM, by which schedulers end a job, interrupts as Ctrl-C does: what is open is closed. Without `argv` the
    process is the command's own: garbage is collected only from the moment that its modules are loaded.
    """
    if argv is None:
        gc.disable()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    token = running.set(tuple(args))
    try:
        with sigterm_as_interrupt():
            sys.exit(_run(args))
    except TltlabError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if debug:
            raise
        missing = _missing_extra(error)
        _fail(str(missing), missing.exit_code)
    except OSError as error:
        if not debug and (said := disk_full(error)):
            _fail(said, 1)
        # A path among the arguments, or a file below it, that the system refuses.
        path = Path(error.filename or os.devnull)
        if debug or not {path, *path.parents} & {Path(arg.partition("=")[2] or arg) for arg in args}:
            raise
        _fail(f"{path}: {error.strerror}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", _INTERRUPTED)
    finally:
        running.reset(token)


def _run(args: list[str]) -> int:
    if _COMPLETE not in os.environ and (not args or args[0] in ("-h", "--help")):
        print(_overview(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args and args[0] == "--version":
        print(version("tltlab"))
        return 0
    import typer
    from typer.exceptions import TyperException

    try:
        code = _group().main(args, prog_name="tltlab", complete_var=_COMPLETE, standalone_mode=False)
    except TyperException as error:
        called = "tltlab" if args[0].startswith("-") else f"tltlab {args[0]}"
        _fail(f"{_as_setting(args, error) or error.format_message()} (see '{called} --help')", 2)
    except ConfigError:
        if _COMPLETE in os.environ:  # an unknown command or a missing extra: nothing to offer
            return 0
        raise
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if code == _INTERRUPTED:
        progress("tltlab: interrupted")
    return code if isinstance(code, int) else 0


def _as_setting(args: Sequence[str], error: Any) -> str:
    """How an option that `train` does not have is given, where it is a setting of recipes; else ""."""
    option = getattr(error, "option_name", None)
    if args[0] != "train" or not option:
        return ""
    from tltlab.runtime.recipe.recipe import settings_named

    # Typer names only the first letter of what begins with one dash.
    given = next(number for number, arg in enumerate(args) if arg.startswith(option))
    option, _, value = args[given].partition("=")
    following = next((arg for arg in args[given + 1 :] if not arg.startswith("-")), "")
    settings = [f"{name}={value or following}" for name in settings_named(option.lstrip("-").replace("-", "_"))]
    return f"No such option: {option}; a setting of the recipe is given as {' or '.join(settings)}" if settings else ""


def _overview() -> str:
    lines = ["usage: tltlab COMMAND ...   (tltlab COMMAND --help for one of them)", ""]
    lines += [f"  {name:18s}{_words().get(name, '')}".rstrip() for name in command_names()]
    return "\n".join(lines)


def _fail(message: str, code: int) -> NoReturn:
    print("tltlab: " + one_line(message), file=sys.stderr)
    sys.exit(code)
