"""House rules that no formatter knows: file sizes, names, words that do not belong. Exit 1 with every finding."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED_STEMS = {"utils", "util", "misc", "helper", "helpers", "common"}
BANNED_TEXT = {
    r"TODO|FIXME|XXX:": "unfinished work belongs into an issue",
    r"/(home|root|work|tmp/wt)/": "a path of one machine",
}
# A generated instruction table and lock files have no size limit.
UNLIMITED = {"requirements/dev.txt"}


def size_limit(path: Path) -> int | None:
    """Lines a file may have, by kind and place."""
    name = path.as_posix()
    if path.suffix not in {".h", ".cuh", ".cpp", ".cu", ".py"} or name in UNLIMITED:
        return None
    if name.startswith("tests/"):
        return 400
    if path.suffix in {".cu", ".cuh"}:
        return 600
    if name.endswith("-inl.h"):  # the body of a source that Highway compiles once per instruction set
        return 400
    return {".h": 200, ".cpp": 400, ".py": 400}[path.suffix]


def findings(path: Path) -> list[str]:
    """All rule breaks of one tracked file."""
    found = []
    if path.stem in BANNED_STEMS:
        found.append(f"{path}: the name '{path.stem}' says nothing; name what it holds")
    if path.suffix not in {".h", ".cuh", ".cpp", ".cu", ".py", ".md", ".sh", ".cmake", ".txt"}:
        return found
    text = (ROOT / path).read_text(encoding="utf-8")
    limit = size_limit(path)
    count = text.count("\n")
    if limit is not None and count > limit:
        found.append(f"{path}: {count} lines, at most {limit}")
    if path != Path("tools/check_style.py"):
        for pattern, reason in BANNED_TEXT.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path}:{line}: '{match.group()}': {reason}")
    return found


def main() -> int:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    all_findings = [line for name in tracked if (ROOT / name).is_file() for line in findings(Path(name))]
    print("\n".join(all_findings), file=sys.stderr) if all_findings else None
    return 1 if all_findings else 0


if __name__ == "__main__":
    sys.exit(main())
