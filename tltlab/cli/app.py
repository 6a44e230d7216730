"""The `tltlab` command: finds its commands by entry point, so a missing extra costs only the commands that need it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from tltlab.console import progress, running, sigterm_does
from tltlab.errors import ConfigError, TltlabError

GROUP = "tltlab.commands"
_INTERRUPTED = 130
_EXTRA_OF_MODULE = {
    "simpy": "sim", "optuna": "sim", "torch": "runtime", "ray": "runtime", "vllm": "runtime",
    "transformers": "runtime", "safetensors": "runtime", "tokenizers": "runtime",
}  # fmt: skip


def load(command: str) -> Any:
    """Return the function behind a command, for programs that compose commands.

    Raises ConfigError for an unknown name, and for a known one whose extra is not installed.
    """
    found: dict[str, EntryPoint] = {e.name: e for e in entry_points(group=GROUP)}
    if command not in found:
        raise ConfigError(f"no command named {command!r}; there are: {', '.join(sorted(found))}")
    try:
        return found[command].load()
    except ModuleNotFoundError as error:
        raise _missing_extra(error) from error


def _missing_extra(error: ModuleNotFoundError) -> TltlabError:
    module = (error.name or "").split(".")[0]
    if module not in _EXTRA_OF_MODULE:
        raise error
    extra = _EXTRA_OF_MODULE[module]
    hint = f"pip install 'tltlab[{extra}]'" + (" (or 'tltlab[runtime-cpu]' without CUDA)" if extra == "runtime" else "")
    return ConfigError(f"this needs {module}, which is not installed: {hint}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 1 the work failed, 2 the input was wrong, 130 interrupted.

    SIGTERM, by which schedulers end a job, interrupts as Ctrl-C does: what is open is closed.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    token = running.set(tuple(args))
    try:
        with sigterm_does(signal.default_int_handler):
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
    except TyperException as error:
        _fail(f"{error.format_message()} (see 'tltlab {args[0]} --help')", 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", _INTERRUPTED)
    finally:
        running.reset(token)


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(version("tltlab"))
        return 0
    target = load(args[0])
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(context_settings={"help_option_names": ["-h", "--help"]})(target)
    code = get_command(app).main(args[1:], prog_name=f"tltlab {args[0]}", standalone_mode=False)
    if code == _INTERRUPTED:
        progress("tltlab: interrupted")
    return code if isinstance(code, int) else 0


def _overview() -> str:
    lines = ["usage: tltlab COMMAND ...   (tltlab COMMAND --help for one of them)", ""]
    for name in sorted(e.name for e in entry_points(group=GROUP)):
        try:
            target = load(name)
            doc = (target.info.help if isinstance(target, typer.Typer) else target.__doc__) or ""
        except ConfigError as error:
            doc = str(error)
        lines.append(f"  {name:18s}{doc.strip().splitlines()[0] if doc else ''}")
    return "\n".join(lines)


def _fail(message: str, code: int) -> NoReturn:
    print("tltlab: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
