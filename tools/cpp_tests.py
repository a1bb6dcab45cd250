"""Names the C++ test binaries that the CMake files of tests/cpp define, as FOLDER/NAME, a line each."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1] / "tests/cpp"
_DEFINES = re.compile(r"^nybble_test\(\s*(\w+)|^add_executable\(\s*(\w+)_test\b", re.MULTILINE)


def names(root: pathlib.Path = ROOT) -> list[str]:
    found = []
    for file in sorted(root.glob("*/CMakeLists.txt")):
        for match in _DEFINES.finditer(file.read_text(encoding="utf-8")):
            found.append(f"{file.parent.name}/{match[1] or match[2]}_test")
    return found


if __name__ == "__main__":
    print("\n".join(names()))
