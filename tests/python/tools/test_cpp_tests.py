import pathlib
import runpy
import types

cpp_tests = types.SimpleNamespace(**runpy.run_path(str(pathlib.Path(__file__).parents[3] / "tools/cpp_tests.py")))


def test_every_test_binary_of_the_build_is_named_once():
    named = cpp_tests.names()
    assert len(named) == len(set(named))
    folders = {path.parent.name for path in cpp_tests.ROOT.glob("*/*_test.cpp")}
    assert {name.split("/")[0] for name in named} == folders and "linear/linear_simt_test" in named


def test_a_name_on_a_line_of_its_own_is_found_and_other_programs_are_not(tmp_path: pathlib.Path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/CMakeLists.txt").write_text("nybble_test(\n  store\n  a.cpp)\nadd_executable(tool main.cpp)\n")
    assert cpp_tests.names(tmp_path) == ["store/store_test"]
