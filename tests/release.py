"""Says what a release lacks: ``python -m tests.release``; with a folder of archives also what is left to do by hand.

The version and the day of a release stand in several files, and archives can lack a module or hold one that was
deleted. No build notices either.
"""

import re
import sys
import zipfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = {
    "shardpass/__init__.py": r'^__version__ = "(.*)"$',
    "pyproject.toml": r'^version = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
}
"""The files that name the version, and the line that does. The first one decides."""
BY_HAND = """By hand remain:
1. `make test` and `make test-long` pass, and the workflow `test` is green on main.
2. git commit -a -m 'shardpass {version}'; git tag v{version}
3. git push origin main v{version}; the workflow `release` builds anew and publishes, once you approve it.
4. In an empty environment and folder: pip install 'shardpass[all]=={version}', shardpass --version, shardpass doctor.
5. Begin a new [Unreleased] in CHANGELOG.md."""


def found(root: Path, name: str, pattern: str) -> str | None:
    """What the pattern's group matches in a file, `None` if nothing does."""
    match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.M)
    return match and match[1]


def version_of(root: Path) -> str:
    name, pattern = next(iter(VERSIONS.items()))
    return found(root, name, pattern) or "?"


def versions_that_differ(root: Path) -> list[str]:
    """One sentence for each file that names another version than the package has."""
    version = version_of(root)
    others = {name: found(root, name, pattern) for name, pattern in VERSIONS.items()}
    return [
        f"{name} has version {other or 'none'}, and shardpass/__init__.py has {version}: write the same in both."
        for name, other in others.items()
        if other != version
    ]


def days_that_differ(root: Path) -> list[str]:
    """What is wrong with the heading of CHANGELOG.md and with the day in CITATION.cff."""
    version, text = version_of(root), (root / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"^## \[Unreleased\]\n+(?!\n|## |\Z)", text, re.M)
    heading = found(root, "CHANGELOG.md", r"^## (?!\[Unreleased\])(.*)$") or "none"
    wrong = []
    if unreleased:
        wrong.append("CHANGELOG.md has changes under [Unreleased]: put the heading of the release above them.")
    match = re.fullmatch(re.escape(f"[{version}]") + r" - (\d{4}-\d\d-\d\d)", heading)
    try:
        day = date.fromisoformat(match[1]) if match else None
    except ValueError:
        day = None
    if day is None:
        expected = f"`## [{version}] - {date.today()}`"
        return [*wrong, f"CHANGELOG.md's first heading of a release is `{heading}`: expected one like {expected}."]
    cited = found(root, "CITATION.cff", r"^date-released: ['\"]?(.*?)['\"]?$")
    if cited != str(day):
        wrong.append(f"CITATION.cff has date-released {cited or 'nowhere'}, and CHANGELOG.md {day}: write that day.")
    return wrong


def checkout_wanted(root: Path) -> list[str]:
    """The lines that tell a reader to install from a checkout, though the index has the release."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [
        f"{page.relative_to(root).as_posix()}, line {number}, needs a checkout: write shardpass[{match[1] or '...'}], "
        "and above it that in a checkout it is a dot."
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if (match := re.search(r"pip install '\.\[([\w,]+)\]'|not on a package index", line))
    ]


def archives_that_differ(root: Path, dist: Path) -> list[str]:
    """What the archives are not called, lack or hold too much, beside the files of the package."""
    version = version_of(root)
    wheel, expected = dist / f"shardpass-{version}-py3-none-any.whl", f"shardpass-{version}.tar.gz"
    names = sorted(path.name for path in dist.glob("*"))
    if names != sorted([wheel.name, expected]):
        return [f"{dist} holds {', '.join(names) or 'nothing'}: expected {wheel.name} and {expected}."]
    package = (path for path in (root / "shardpass").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    source = {path.relative_to(root).as_posix() for path in package}
    built = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    lacking = [f"{wheel.name} lacks {name}: see [tool.setuptools] in pyproject.toml." for name in source - built]
    return sorted(lacking) + [
        f"{wheel.name} holds {name}, which the package has not." for name in sorted(built - source)
    ]


def main(dist: str | None = None) -> int:
    """Prints what is wrong, or what is left; returns the exit status."""
    wrong = [*versions_that_differ(ROOT), *days_that_differ(ROOT), *checkout_wanted(ROOT)]
    if dist is not None:
        wrong += archives_that_differ(ROOT, Path(dist))
    if wrong:
        print("\n".join(["This is no release yet:", *wrong]))
    elif dist is not None:
        print(BY_HAND.format(version=version_of(ROOT)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
