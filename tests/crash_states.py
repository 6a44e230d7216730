"""What a folder may hold after the power went, at every moment of what a program did in it.

The model of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018): what `os.fsync` of a file has
not confirmed may be there, be what it was before, half of it or zeros; a name (made, moved or removed) that `os.fsync`
of its folder has not confirmed may have changed or not, each for itself, but those of one name in their order. Moves
are atomic. A process that was killed, with all that it did on the disk, is one of these states.

Files are looked at before and after every call that changes names or confirms something, so that it does not matter who
writes them: Python, Arrow or safetensors.
"""

import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Name = tuple[int, str]
"""A folder and a name in it."""
ROOT = 0
_HALF, _ZEROS, _BEFORE = "half", "zeros", "before"


@dataclass
class Content:
    """What a file held and from when on; when it was confirmed. A folder has None."""

    versions: list[tuple[int, bytes]] | None
    confirmed: list[int] = field(default_factory=list)

    def at(self, moment):
        """The newest content, and the one confirmed last where that is another, or not known to be there at all."""
        versions = [(since, data) for since, data in self.versions or () if since <= moment]
        newest_since, newest = versions[-1] if versions else (0, b"")
        confirmed = max((when for when in self.confirmed if when <= moment), default=-1)
        if confirmed >= newest_since:
            return newest, None
        return newest, next((data for since, data in reversed(versions) if since <= confirmed), b"")


class Disk:
    """Logs what happens below the folder `root`; within, `moment` is the number of what has happened so far."""

    def __init__(self, root):
        self.root = root
        self.contents = {ROOT: Content(None)}
        self.changes = []
        self.moment = 0
        self._names = {}
        self._inodes = {}
        self._looking = threading.RLock()

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync"):
            self._patch.setattr(os, name, self._watched(getattr(os, name), confirms=name == "fsync"))
        self.look()
        for content in self.contents.values():
            content.confirmed.append(self.moment)
        return self

    def __exit__(self, *error):
        self._patch.undo()

    def _watched(self, call, *, confirms):
        def watched(*args, **kwargs):
            with self._looking:
                self.look()
                result = call(*args, **kwargs)
                if confirms:
                    self.moment += 1
                    number = self._inodes.get(os.fstat(args[0]).st_ino)
                    if number is not None:
                        self.contents[number].confirmed.append(self.moment)
                else:
                    self.look()
                return result

        return watched

    def look(self):
        """Log what has changed since the last look; the moment it is now."""
        with self._looking:
            self.moment += 1
            names = {}
            inodes = {self.root.stat().st_ino: ROOT}
            self._walk(self.root, ROOT, names, inodes)
            came = {name: number for name, number in names.items() if self._names.get(name) != number}
            gone = {name: number for name, number in self._names.items() if names.get(name) != number}
            left = {number: name for name, number in gone.items()}
            for name, number in came.items():
                # A file that has left one name for another was moved there, over what had that name.
                before = left.pop(number, None)
                self.changes.append((self.moment, ({} if before is None else {before: None}) | {name: number}))
            self.changes += [(self.moment, {name: None}) for name in left.values() if name not in came]
            self._names, self._inodes = names, inodes
            return self.moment

    def _walk(self, folder, number, names, inodes):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            inode = entry.stat(follow_symlinks=False).st_ino
            is_folder = entry.is_dir(follow_symlinks=False)
            child = self._inodes.get(inode)
            if child is None:
                child = len(self.contents)
                self.contents[child] = Content(None if is_folder else [])
            names[number, entry.name], inodes[inode] = child, child
            if is_folder:
                self._walk(Path(entry.path), child, names, inodes)
                continue
            data, versions = Path(entry.path).read_bytes(), self.contents[child].versions
            assert versions is not None
            if not versions or versions[-1][1] != data:
                versions.append((self.moment, data))

    def states(self, moment):
        """What may be there after the power went at a moment: files, and folders as None, by their place."""
        happened = [change for change in self.changes if change[0] <= moment]
        lasting = [any(self._confirmed(folder, when, moment) for folder, _ in names) for when, names in happened]
        for applied in _ideals([names for _, names in happened], lasting):
            tree = {}
            for (_, names), there in zip(happened, applied, strict=True):
                if there:
                    tree.update(names)
            for how in (None, _BEFORE, _HALF, _ZEROS):
                yield dict(self._files(tree, ROOT, "", moment, how))

    def _confirmed(self, folder, since, moment):
        return any(since <= when <= moment for when in self.contents[folder].confirmed)

    def _files(self, tree, folder, place, moment, how):
        for (within, name), number in tree.items():
            if within == folder and number is not None:
                content, path = self.contents[number], f"{place}{name}"
                if content.versions is None:
                    yield path, None
                    yield from self._files(tree, number, f"{path}/", moment, how)
                else:
                    data, before = content.at(moment)
                    if before is not None and how is not None:
                        data = {_BEFORE: before, _HALF: data[: len(data) // 2], _ZEROS: bytes(len(data))}[how]
                    yield path, data


def _ideals(changes, lasting):
    """Which changes are there: those that last; and of the others none, all up to one, one alone, all but one."""

    def with_before(wanted):
        # Who sees a later change of a name sees the earlier ones.
        there, seen = [*wanted], set()
        for at in reversed(range(len(changes))):
            there[at] = there[at] or bool(seen & changes[at].keys())
            if there[at]:
                seen |= changes[at].keys()
        return there

    pending = [at for at, lasts in enumerate(lasting) if not lasts]
    yield with_before(lasting)
    for number, at in enumerate(pending):
        yield with_before([lasts or n in pending[: number + 1] for n, lasts in enumerate(lasting)])
        yield with_before([lasts or n == at for n, lasts in enumerate(lasting)])
        # Without this one, and so without what came after it under its names.
        lost, without = set(changes[at]), []
        for n, lasts in enumerate(lasting):
            if n == at or (n > at and not lasts and lost & changes[n].keys()):
                lost |= changes[n].keys()
                without.append(False)
            else:
                without.append(True)
        yield with_before(without)


def put(state, folder):
    """Have a folder hold a state and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for place, data in state.items():
        if data is None:
            (folder / place).mkdir()
        else:
            (folder / place).write_bytes(data)


def crashes(disk, told, *, short):
    """Each state that a disk may be in, with what a program had been told before and is told next.

    About `short` of them, evenly over time, unless TLTLAB_CRASH is set.
    """
    found = {}
    # In between nothing happened.
    eventful = {moment for moment, _ in (*disk.changes, *told)}
    for content in disk.contents.values():
        eventful.update(content.confirmed, (since for since, _ in content.versions or ()))
    for moment in sorted(eventful - set(range(told[0][0]))):
        before = max(at for at, (since, _) in enumerate(told) if since <= moment)
        for state in disk.states(moment):
            key = before, tuple(sorted(state.items(), key=lambda item: item[0]))
            found.setdefault(key, ((told[before][1], told[min(before + 1, len(told) - 1)][1]), state))
    step = 1 if os.environ.get("TLTLAB_CRASH") else max(1, len(found) // short)
    yield from list(found.values())[::step]
