"""Count Python tokens, without comments, docstrings and layout; fail above the ceilings of pyproject.toml.

Lines are free: only what a reader has to understand counts. The ceilings only ever fall.
"""

import ast
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens(source: str) -> int:
    """Return the number of tokens of a module."""
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    return sum(
        token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start in docstrings)
        for token in tokenize.generate_tokens(StringIO(source).readline)
    )


def modules(folder: Path) -> Iterator[Path]:
    """Yield the modules below a folder; links are not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from modules(path)
        elif path.suffix == ".py":
            yield path


def main() -> int:
    """Print each group's tokens and ceiling; return 1 where one is above."""
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tltlab"]["volume"]
    failed = 0
    for name, group in ceilings.items():
        counted = sum(tokens(path.read_text()) for folder in group["folders"] for path in modules(ROOT / folder))
        print(f"{name}: {counted:,} tokens, at most {group['tokens']:,}")
        failed |= counted > group["tokens"]
    return failed


if __name__ == "__main__":
    sys.exit(main())
