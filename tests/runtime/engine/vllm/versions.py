"""Which versions of vLLM have what the adapter touches, read out of wheels: the table of the runtime's README.

`python tests/runtime/engine/vllm/versions.py WHEEL ...` writes what wheels have into `versions.json`, and prints the
table.
"""

import ast
import json
import re
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tltlab.runtime.engine.vllm import CAPABILITIES, VERSIONS, RequiredName


class Sources:
    """vLLM's sources: a wheel, or the folder that `vllm` is in. Nothing of them is run."""

    def __init__(self, path):
        self._root = zipfile.Path(path) if path.is_file() else path
        self._modules = {}
        self._classes = {}

    @classmethod
    def installed(cls):
        """Those of the vLLM that an import would find, which is not imported; None without one."""
        spec = find_spec("vllm")
        return cls(Path(spec.origin).parents[1]) if spec is not None and spec.origin else None

    def version(self):
        """The version that the sources give themselves; "" where they give none."""
        return _found(r"^__version__ = version = ['\"]([^'\"+]+)", self._root / "vllm" / "_version.py")

    def torch(self):
        """The torch that a wheel needs; "" where it is not told."""
        about = [path for path in self._root.iterdir() if re.fullmatch(r"vllm(_cpu)?-.*\.dist-info", path.name)]
        return _found(r"^Requires-Dist: torch==([\d.]+)", about[0] / "METADATA") if about else ""

    def lacks(self, capability):
        """What a capability touches that is not in these sources."""
        return tuple(touch for touch in CAPABILITIES[capability].touches if not self.has(touch))

    def has(self, touch):
        """Whether what is touched is there."""
        symbol = RequiredName.of(touch)
        module, node = self._named(symbol.module, symbol.path[0]) or (symbol.module, None)
        if len(symbol.path) > 1:
            node = self._member(module, node, symbol.path[1]) if isinstance(node, ast.ClassDef) else None
        if node is None or not symbol.parameters:
            return node is not None
        names = _parameters(node)
        if isinstance(node, ast.ClassDef):
            names = _parameters(self._member(module, node, "__init__"))
            names.update(name for name in symbol.parameters if self._member(module, node, name) is not None)
        return names.issuperset(symbol.parameters)

    def _member(self, module, cls, name):
        """What a class or one of its bases defines by a name, in its body or on `self`."""
        if cls not in self._classes:
            members = {}
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    members[node.attr] = node
            for statement in cls.body:
                members.update(dict.fromkeys(_defined(statement), statement))
            self._classes[cls] = members
        if name in self._classes[cls]:
            return self._classes[cls][name]
        for base in cls.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            where, node = (self._named(module, plain.id) if isinstance(plain, ast.Name) else None) or ("", None)
            member = self._member(where, node, name) if isinstance(node, ast.ClassDef) and node is not cls else None
            if member is not None:
                return member
        return None

    def _named(self, module, name):
        """What a module calls by a name, and the module that defines it."""
        node = self._module(module).get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        package = module.split(".") if self._is_package(module) else module.split(".")[:-1]
        if node.level:
            source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        elif (node.module or "").startswith("vllm."):
            source = (node.module or "").removeprefix("vllm.")
        else:
            return module, node
        return self._named(source, alias.name)

    def _file(self, module):
        return self._root.joinpath("vllm", *module.split("."))

    def _is_package(self, module):
        return bool((self._file(module) / "__init__.py").is_file())

    def _module(self, module):
        """A module's names, also those that only some platforms define."""
        if module not in self._modules:
            base = self._file(module)
            path = base / "__init__.py" if self._is_package(module) else base.parent / f"{base.name}.py"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            names = {}
            for statement in _statements(ast.parse(text).body):
                names.update(dict.fromkeys(_defined(statement), statement))
            self._modules[module] = names
        return self._modules[module]


def _found(pattern, path):
    """The first group of a pattern in a file; "" where there is none, or no file."""
    match = re.search(pattern, path.read_text(), re.M) if path.is_file() else None
    return match[1] if match else ""


def _statements(body):
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(statement):
    """The names that a statement gives a meaning to."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def has_each(sources):
    """Whether these sources have each capability."""
    return {name: not sources.lacks(name) for name in CAPABILITIES}


def table(versions):
    """The README's table of what `VERSIONS` holds, the newest version first: what each lacks, beside the later ones."""
    lines = ["| vLLM | torch | lacks, beside what later ones lack |", "|---|---|---|"]
    lacking = set()
    for version in sorted(versions, key=_numbers, reverse=True):
        lacks = [name for name, has in versions[version]["has"].items() if not has]
        assert lacking.issubset(lacks), f"{version} has {lacking.difference(lacks)}, which a later version lacks"
        more = ", ".join(name for name in lacks if name not in lacking)
        lines.append(f"| {version} | {versions[version]['torch']} | {more} |")
        lacking.update(lacks)
    return "\n".join(lines) + "\n"


def _numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def main(paths):
    """Hold wheels, or folders that a vLLM is installed in, against the table; `VERSIONS` and what goes into the README.

    What was found of other versions before is kept as long as the capabilities are the same.
    """
    before = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {}
    versions = {v: row for v, row in before.items() if row["has"].keys() == CAPABILITIES.keys()}
    for sources in (Sources(Path(path)) for path in paths):
        versions[sources.version()] = {"torch": sources.torch(), "has": has_each(sources)}
    VERSIONS.write_text(json.dumps({v: versions[v] for v in sorted(versions, key=_numbers)}, indent=1) + "\n")
    sys.stdout.write(table(versions))


if __name__ == "__main__":
    main(sys.argv[1:])
