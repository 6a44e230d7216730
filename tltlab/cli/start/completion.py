"""`tltlab completion`: what a shell offers when Tab is pressed: commands, their options, files for the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from tltlab.errors import ConfigError, did_you_mean

_BASH = """_tltlab() {
  local words; words=$(tltlab completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _tltlab tltlab"""
_FISH = """complete -c tltlab -a '(tltlab completion words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null \
| string split " ")'"""
SHELLS = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}", "fish": _FISH}


def completion(
    shell: Annotated[str, typer.Argument(help=f"{', '.join(SHELLS)}; words: what fits after the arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Of words: the line so far.")] = None,
) -> None:
    """Print a script that has the shell complete command lines: put `eval "$(tltlab completion bash)"` into ~/.bashrc.

    Example: tltlab completion zsh
    """
    if shell == "words":
        print(" ".join(words(arguments or [])))
        return
    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}{did_you_mean(shell, SHELLS)}; there are {', '.join(SHELLS)}")
    print(SHELLS[shell])


def words(line: list[str]) -> list[str]:
    """What may stand at the end of a line: commands, or the options and subcommands of the one that it names."""
    from tltlab.cli.app import click_command, command_names

    before, current = line[:-1], line[-1] if line else ""
    if not before:
        return [name for name in command_names() if name.startswith(current)]
    try:
        command = click_command(before[0])
    except ConfigError:
        return []
    inner = getattr(command, "commands", {})
    for word in before[1:]:
        if word in inner:
            command, inner = inner[word], {}
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    return [word for word in (*inner, *options, "--help") if word.startswith(current)]
