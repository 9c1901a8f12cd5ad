"""Building kernels: what names a library, what happens without a compiler, at once in two processes, and ahead of time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from kernels.build import KernelBuildError, KernelError, Library

ANSWER = 'extern "C" int answer() { return ANSWER; }\n'
LIBRARY = Library("answer.cpp", {"ANSWER": 42})
needs_compiler = pytest.mark.skipif(build.find_cxx() is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small csrc of this test's own, an empty cache, nothing built ahead."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER)
    (folder / "answer.cu").write_text(ANSWER)
    (folder / "shared.cuh").write_text("// one\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("PAGEWIRE_KERNEL_CACHE", str(tmp_path / "cache"))
    build._sources_digest.cache_clear()
    yield folder
    build._sources_digest.cache_clear()


@pytest.fixture
def no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "find_cxx", lambda: None)


def name_of(library: Library, arch: str = "sm_90a") -> str:
    build._sources_digest.cache_clear()  # kept for the life of a process
    return build.library_name(library, arch)


@needs_compiler
def test_a_library_is_built_once_and_loaded(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load(LIBRARY).answer() == 42
    built = list((tmp_path / "cache").iterdir())
    assert [path.name for path in built] == [name_of(LIBRARY, "native")]
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_command", lambda *_: pytest.fail("compiled again"))
    assert build.load(LIBRARY).answer() == 42


def test_sources_macros_and_target_name_a_library(sources: Path) -> None:
    cpp, cuda = Library("answer.cpp"), Library("answer.cu")
    names = [
        name_of(cpp, "x86-64-v3"), name_of(cpp, "cascadelake"), name_of(LIBRARY, "x86-64-v3"), name_of(cuda), name_of(cuda, "sm_80"),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    (sources / "shared.cuh").write_text("// two\n")
    assert name_of(cuda) != names[3], "a header of CUDA changed"
    assert name_of(cpp, "x86-64-v3") == names[0], "C++ includes none of them"
    (sources / "shared.h").write_text("// one\n")
    assert name_of(cpp, "x86-64-v3") != names[0]
    names[0] = name_of(cpp, "x86-64-v3")
    (sources / "answer.cpp").write_text(ANSWER + "// two\n")
    assert name_of(cpp, "x86-64-v3") != names[0]


def test_what_was_built_for_another_processor_is_not_found(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = name_of(LIBRARY, "native")
    monkeypatch.setattr(build, "_cpu_name", lambda: "another")
    assert name_of(LIBRARY, "native") != here


@pytest.mark.parametrize("line", ["model name : {}", "flags : {}", "CPU implementer : {}", "CPU part : {}", "Features : {}"])
def test_processors_that_differ_have_different_names(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for value in ("0x41", "0x46"):
        monkeypatch.setattr(build.Path, "read_text", lambda _, value=value: f"processor : 0\n{line.format(value)}\n")
        names.add(build._cpu_name())
    assert len(names) == 2


def test_a_compiler_that_hangs_is_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow-cxx"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(KernelBuildError, match=r"slow-cxx --version did not end"):
        build.load(LIBRARY)


@pytest.mark.usefixtures("no_compilers")
def test_without_a_compiler_the_error_says_what_to_do(sources: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"answer\.cu needs nvcc.*CUDA_HOME.*pagewire\[nvcc\]"):
        build.load(Library("answer.cu"), "sm_90a")
    with pytest.raises(KernelBuildError, match=r"answer\.cpp needs a C\+\+ compiler.*CXX"):
        build.load(LIBRARY)


@needs_compiler
def test_what_the_compiler_refuses_is_shown_and_leaves_nothing_behind(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text("this is not C++\n")
    with pytest.raises(KernelBuildError, match="this is not C"):
        build.load(LIBRARY)
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("PAGEWIRE_KERNEL_CACHE", str(tmp_path / "a file" / "cache"))
    with pytest.raises(KernelBuildError, match="PAGEWIRE_KERNEL_CACHE"):
        build.load(LIBRARY)


def test_a_user_without_a_home_is_told_what_to_set(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PAGEWIRE_KERNEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", home)
    with pytest.raises(KernelBuildError, match="PAGEWIRE_KERNEL_CACHE"):
        build.load(LIBRARY)


def test_a_compilation_that_hangs_ends(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow-cxx"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version) ;; *) exec sleep 60 ;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "CXX_TIMEOUT_S", 0.2)
    with pytest.raises(KernelBuildError, match=r"slow-cxx .* did not end within"):
        build.load(LIBRARY)


@needs_compiler
def test_processes_that_build_at_once_end_with_one_library(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kernels import build\n"
        "build.SOURCES = Path(sys.argv[1])\n"
        "print(build.load(build.Library('answer.cpp', {'ANSWER': 42})).answer())"
    )
    command = [sys.executable, "-c", code, str(sources)]
    root = Path(build.__file__).parents[1]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["42"] * 4
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [name_of(LIBRARY, "native")]


@needs_compiler
def test_what_was_built_ahead_serves_without_a_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build.cpu_targets()[-1]
    build.build(LIBRARY, target, build.PREBUILT)
    monkeypatch.setattr(build, "find_cxx", lambda: None)
    assert build.load(LIBRARY).answer() == 42


def test_the_best_target_this_processor_runs_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for flags, targets in (
        ("sse2 avx2 bmi1 bmi2 fma f16c movbe", ["x86-64-v3"]),
        ("sse2 avx2 bmi1 bmi2 fma f16c movbe avx512f avx512bw avx512cd avx512dq avx512vl", ["x86-64-v3"]),
        ("sse2 avx2 bmi1 bmi2 fma f16c movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni", ["cascadelake", "x86-64-v3"]),
        ("sse2 avx", []),
    ):
        monkeypatch.setattr(build.Path, "read_text", lambda _, flags=flags: f"model name : x\nflags : {flags}\n")
        assert build.cpu_targets() == targets


@needs_compiler
def test_arm_names_its_own_processor_as_clang_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    assert "-mcpu=native" in build._command(LIBRARY, "native")
    assert "-march=armv8-a" in build._command(LIBRARY, "armv8-a")
    assert build.cpu_targets() == ["armv8-a"]


@needs_compiler
def test_no_option_changes_the_floating_point_mode_of_the_process() -> None:
    """-ffast-math links start-up code that flushes subnormals to zero in everything that runs beside it."""
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(build._command(LIBRARY, "native"))


def test_a_launcher_s_text_is_raised() -> None:
    build.check(None)
    with pytest.raises(KernelError, match="no such stride"):
        build.check(b"no such stride")


# ---- the command ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_libraries", lambda: [LIBRARY, Library("answer.cu", {"ANSWER": 7})])


@needs_compiler
@pytest.mark.usefixtures("one_library")
def test_the_command_builds_lists_and_says_what_failed(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, folder = build.cpu_targets()[0], tmp_path / "out"
    arguments = ["--arch", "none", "--cpu", target, "--output", str(folder)]
    assert build.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"answer.cpp {target} ANSWER=42: {name_of(LIBRARY, target)}, missing")
    assert build.main(arguments) == 0
    assert "[1/1] answer.cpp" in capsys.readouterr().out
    assert build.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out.strip().endswith("there")
    (sources / "answer.cpp").write_text("this is not C++\n")
    assert build.main(arguments) == 1
    assert "this is not C++" in capsys.readouterr().err


@pytest.mark.usefixtures("one_library", "no_compilers")
def test_the_command_asks_for_nvcc_only_where_cuda_is_wanted(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--cpu", "none", "--output", str(tmp_path / "out")]) == 0
    assert build.main(["--cpu", "none", "--arch", "sm_90a,sm_80", "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("needs nvcc") == 2


def test_flags_name_a_library(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, library in (("CUDA_FLAGS", Library("answer.cu")), ("CXX_FLAGS", Library("answer.cpp"))):
        before = name_of(library, "x86-64-v3")
        monkeypatch.setattr(build, flags, (*getattr(build, flags), "-g"))
        assert name_of(library, "x86-64-v3") != before, flags


def test_a_kernel_of_hopper_instructions_is_built_for_nothing_else() -> None:
    jobs = build._jobs(["sm_90a", "sm_80", "sm_100a"], [])
    by_source = {source: {arch for one, arch in jobs if one.source == source} for source in {one.source for one, _ in jobs}}
    assert all(by_source.pop(source) == {"sm_90a"} for source in ("flash_attention_sm90.cu", "skinny_linear.cu"))
    assert all(archs == {"sm_90a", "sm_80", "sm_100a"} for archs in by_source.values())


def test_every_file_that_names_libraries_is_built_ahead() -> None:
    folder = Path(build.__file__).parent
    naming = {path.stem for path in folder.glob("*.py") if "\ndef libraries(" in path.read_text()}
    assert naming == set(build.MODULES)
    assert {path.name for path in (folder / "csrc").iterdir() if path.suffix in (".cu", ".cpp")} - {"read_floor.cu"} == {
        library.source for library in build.all_libraries()
    }


CUDA_SOURCES = sorted(path.name for path in (Path(build.__file__).parent / "csrc").glob("*.cu"))


@pytest.mark.nvcc
@needs_compiler
@pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc: pip install 'pagewire[nvcc]'")
@pytest.mark.parametrize("source", CUDA_SOURCES)
def test_every_cuda_source_compiles(source: str) -> None:
    """No GPU is needed for that. The cache is the user's own, so that it happens once."""
    library = next((library for library in build.all_libraries() if library.source == source), Library(source))
    assert build.build(library, "sm_90a", build.cache_folder()).is_file()
