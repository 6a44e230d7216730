"""The `tltlab` command: finds its commands by entry point, so a missing extra costs only the commands that need it.

A command is loaded when it is called; the overview has the first lines of their helps without loading them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points, metadata, requires, version
from pathlib import Path
from typing import Any, NoReturn

from tltlab.console import JSON, progress, running, sigterm_as_interrupt
from tltlab.errors import ConfigError, TltlabError, did_you_mean, one_line

GROUP = "tltlab.commands"
_INTERRUPTED = 130
_COMPLETE = "_TLTLAB_COMPLETE"
"""Set by the shell that completes a command line, as Typer names it."""
_PURPOSES = {
    "audit": "Sample a real engine and compare the samples with the exact distribution of its model, case by case.",
    "bench": "Benchmarks, as ratios within one run; for a clone of the repository.",
    "calibrate": "Fit costs, acceptance and drafter training to a trace, costs to a table; print residuals and "
    "held-out errors.",
    "compare": "Compare policies, or systems from the literature, on the same responses; lists of values make a grid.",
    "costs": "Print ms and tokens per second of an iteration by a cost model for each batch, plain and with "
    "speculation.",
    "demo": "The whole loop on this machine's CPU: train, record, calibrate, predict, pick a policy, run it, compare.",
    "doctor": "Find what is wrong with a run, and name the setting to change.",
    "export-drafter": "Write a drafter as a checkpoint that stock vLLM serves, after a check of its acceptance in "
    "stock vLLM.",
    "export-policy": "Draft depths by batch size and CUDA graphs for them, as settings for vLLM 0.32.",
    "make-model": "Train a small reasoning model from scratch, with prompts, a checkable answer and a long tail.",
    "new": "Write a recipe or a part of your own that runs as it stands, to be changed.",
    "profile": "Time a real engine over batch x draft depth x context, for `tltlab calibrate TABLE`.",
    "rehearse": "Play a recorded rollout on a real engine, with a model's shape and no weights, under each policy.",
    "report": "Write one self-contained HTML page on a run or a comparison: pictures, tables, and how to repeat it.",
    "settings": "List every setting of a recipe, or of one section, with its default, its type and what it does.",
    "simulate": "Replay a trace's responses under a policy, a cost model and a placement.",
    "timeline": "Draw what every worker did over time, and how many requests were running.",
    "trace": "Describe, validate, repair, import, generate and annotate traces.",
    "train": "Train with GRPO on Ray and vLLM; every rollout is recorded in OUT/trace.",
    "train-drafter": "Warm up a drafter for a model, offline, on responses of that model; report held-out acceptance.",
    "tune": "Find a policy for a trace in simulation, judge it on RL steps held out, and report whether it was "
    "worth it.",
    "ui": "Show the runs of a folder in a browser: a list, each one's page, two side by side; a live run is followed.",
    "verify": "Predict every RL step of a run from the other ones, and compare with what was measured.",
    "what-if": "Estimate the speed-up of speculation for responses of these lengths, on which GPUs, and what limits "
    "it.",
}
"""First line of each command's help; a command of another package has none here."""
_GONE = {
    "advise": "`tltlab what-if` estimates the benefit of training the drafter",
    "completion": "`tltlab --install-completion` sets the shell up, `tltlab --show-completion` prints the script",
    "experiment": "`tltlab bench` measures on engines, in a clone (batch-size, systems, drafter), and notebook 10 "
    "simulates TLT's published set-ups",
    "map": "`tltlab compare` takes lists of values, and notebook 08 draws which family pays where",
    "sweep": "`tltlab compare` takes lists, such as --workers 4,8 --gpus 8xH100,8xB200",
    "off-policy": "decisions.parquet of a trace has the propensities that such estimates are computed from",
}
"""Commands of the release before, and what replaces them."""
_GONE_OPTIONS = {
    ("compare", "--search"): "`tltlab compare --systems all` has every system, --placement another order",
    ("compare", "--claims"): "--json has each system's `claim`",
    ("compare", "--ranges"): "`tltlab what-if` has the 90 % range",
    ("compare", "--no-ranges"): "no range of ranks is made any more",
    ("tune", "--max-buckets"): "tables have four rows at most, as those of what-if",
    ("audit", "--without-fix"): "the audit is of engines as they run",
    ("calibrate", "--freshness-out"): "--acceptance fresh --acceptance-out FILE writes the same model",
    ("export-drafter", "--layout"): "EAGLE-3 heads are written in speculators' layout",
    ("make-model", "--mtp"): "models with MTP layers come from elsewhere; drafter.loss.kind = mtp trains them",
    ("timeline", "--rollout-only"): "tltlab.timeline in Python has rollout_only",
    ("timeline", "--title"): "tltlab.timeline in Python has a title",
}
"""Options of the release before, and what replaces them."""
_BROUGHT_BY = {"zmq": "pyzmq", "torch": "vllm", "tokenizers": "transformers", "huggingface_hub": "transformers"}
"""The requirement that a module comes with, where it has another name."""


def click_command(name: str) -> Any:
    """Return a command as Typer has it, with its parameters and its subcommands.

    Raises ConfigError for a name that is unknown or was removed, and for a command whose extra is not installed.
    """
    import typer
    from typer.main import get_command

    commands = _commands()
    if name in _GONE and name not in commands:
        raise ConfigError(f"the command {name!r} was removed: {_GONE[name]}")
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
    import typer
    from typer.main import get_command

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
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
            return _PURPOSES.get(str(self.name), "")

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
        option = getattr(error, "option_name", "")
        if gone := _GONE_OPTIONS.get((args[0], option)):
            _fail(f"{called}: the option {option} was removed: {gone}", 2)
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
    lines += [f"  {name:18s}{_PURPOSES.get(name, '')}".rstrip() for name in command_names()]
    return "\n".join(lines)


def _fail(message: str, code: int) -> NoReturn:
    print("tltlab: " + one_line(message), file=sys.stderr)
    sys.exit(code)
