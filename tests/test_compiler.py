"""The file of the programs in C: compiled, checked, and what happens when it or the compiler is broken."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsketch import compiler, environment
from kvsketch.ops.common import native
from tests.helpers.waiting import wait_for

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")
needs_users = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="root alone can give files away")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """As a process that has not looked for programs yet, before and after the test."""
    for cached in (compiler.programs, native.library):
        cached.cache_clear()
    yield
    for cached in (compiler.programs, native.library):
        cached.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that do nothing, which any compiler makes in no time; the compilers write a log."""
    sources = tmp_path / "ops"
    (sources / "one").mkdir(parents=True)
    (sources / "one" / "native.c").write_text("".join(f"void {name}(void) {{}}\n" for name in compiler.ARGUMENTS))
    own = script(tmp_path / "compiler", f'echo run >> {tmp_path / "log"}\nexec {COMPILER} "$@"')
    monkeypatch.setattr(compiler, "ROOT", sources)
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CC", str(own))
    return tmp_path / "home" / "native"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def start() -> compiler.Programs:
    """What the next process finds."""
    compiler.programs.cache_clear()
    return compiler.programs()


def runs(home: Path) -> int:
    return len((home.parent.parent / "log").read_text().splitlines())


def compiled(home: Path) -> Path:
    (path,) = home.glob("*.so")
    return path


@needs_compiler
def test_a_file_is_compiled_once_and_named_by_its_content(home: Path) -> None:
    assert start().library is not None and start().library is not None and runs(home) == 1
    path = compiled(home)
    assert path.stem.endswith(compiler._digest(path)) and path.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert {each.name for each in home.iterdir()} <= {path.name, "lock"}
    (compiler.ROOT / "one" / "more.h").write_text("/* another text */")
    assert start().library is not None and runs(home) == 2


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "writable by others": lambda path: path.chmod(0o666),
    "a link": lambda path: _linked(path),
    "gone": lambda path: path.unlink(),
}


def _linked(path: Path) -> None:
    other = path.parent.parent / "elsewhere.so"
    path.rename(other)
    path.symlink_to(other)


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_compiled_again(home: Path, damage: str) -> None:
    start()
    # This process reads the file itself: a copy is damaged.
    path = compiled(home)
    shutil.copy(path, home / "copy")
    (home / "copy").replace(path)
    DAMAGES[damage](path)
    assert (made := start()).library is not None and not made.warning
    assert start().library is not None and runs(home) == 2
    path = compiled(home)
    assert path.is_file() and not path.is_symlink() and path.stem.endswith(compiler._digest(path))


@needs_compiler
def test_a_file_that_lacks_a_function_is_compiled_again(home: Path, tmp_path: Path) -> None:
    """Its name fits its content, but it is not what these sources give."""
    start()
    name = compiled(home).stem.partition("-")[0]
    compiled(home).unlink()
    (tmp_path / "other.c").write_text("void kvsketch_attend(void) {}\n")
    other = tmp_path / "other.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(other)], check=True)
    other.chmod(0o600)
    shutil.copy(other, home / f"{name}-{compiler._digest(other)}.so")
    assert start().library is not None and runs(home) == 2
    compiled(home)


@needs_compiler
@needs_users
def test_files_and_folders_of_others_are_not_used(home: Path) -> None:
    start()
    os.chown(compiled(home), 12345, 12345)
    assert start().library is not None and runs(home) == 2 and compiled(home).stat().st_uid == 0
    os.chown(home, 12345, 12345)
    made = start()
    assert made.library is not None and runs(home) == 3
    assert f"{home} cannot hold the compiled programs (it belongs to another user)" in made.warning
    assert made.warning in environment.describe().warnings


@needs_compiler
def test_a_folder_that_others_may_write_is_closed(home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    assert start().library is not None and home.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_a_home_that_cannot_be_written_serves_one_process(home: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    made = start()
    assert made.library is not None and "every process compiles them again" in made.warning


@needs_compiler
def test_a_kill_leaves_nothing_behind(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    slow = script(tmp_path / "slow", f"touch {begun} $TMPDIR/part.s\nexec sleep 3600")
    code = f"from kvsketch import compiler; compiler.ROOT = compiler.Path({str(compiler.ROOT)!r}); compiler.programs()"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CC": str(slow)}, start_new_session=True)
    try:
        wait_for(begun.exists, "a compiler that has begun")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert list(home.glob(f"{compiler.ROOM}*/*"))
    assert start().library is not None
    assert {each.name for each in home.iterdir()} <= {compiled(home).name, "lock"}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("false", "false: exit status 1, and no file"),
        ("true", "true: exit status 0, and no file"),
        ('gcc "', 'gcc ": CC is not a command (No closing quotation)'),
        ("/nowhere/cc -O1", "/nowhere/cc -O1: No such file or directory"),
    ],
)
def test_a_compiler_that_fails_is_told_once_and_not_reported(
    home: Path, command: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(environment, "gpu_names", list)
    with pytest.warns(RuntimeWarning) as warned:
        assert [native.library() for _ in range(2)] == [None, None]
    assert [told in str(each.message) for each in warned] == [True]
    described = environment.describe()
    assert described.kernels.startswith("torch reference: no GPU, and the programs in C cannot be compiled by ")
    assert told in described.kernels and str(warned[0].message) in described.warnings


@needs_compiler
def test_the_warning_holds_the_first_error_of_the_compiler(home: Path) -> None:
    (compiler.ROOT / "one" / "native.c").write_text('#include <stdint.h>\nint f(void) { return none; }\n#error "two"\n')
    made = start()
    assert made.library is None and "one/native.c:2:" in made.warning and "two" not in made.warning
    assert not list(home.glob(f"{compiler.ROOM}*"))


@needs_compiler
def test_a_compiler_that_knows_no_native_flag_is_asked_otherwise(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clang before 15 refuses -march=native on ARM, others -mcpu=native."""
    for refused in ("-march=native", "-march=native|-mcpu=native"):
        text = f'for each in "$@"; do case "$each" in {refused}) echo "error: $each" >&2; exit 1;; esac; done'
        monkeypatch.setenv("CC", str(script(tmp_path / f"old{len(refused)}", f'{text}\nexec {COMPILER} "$@"')))
        assert start().library is not None


@needs_compiler
def test_the_next_compiler_is_tried(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CC, one that fails is no reason to run without programs."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "cc", "exit 1")
    working = script(tmp_path / "bin" / "gcc", f'PATH={os.environ["PATH"]} exec {COMPILER} "$@"')
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert start().compiler == str(working) and start().library is not None


NAMED = [f"gcc-{number}" for number in range(9, 17)] + [f"clang-{number}" for number in range(14, 24)]


@pytest.mark.parametrize("name", ["cc", "gcc", "clang", *NAMED])
def test_every_compiler_of_this_machine_takes_the_sources(name: str) -> None:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    for source in compiler._sources():
        command = [found, "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-function", *compiler.FLAGS[3:], str(source)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stderr}"


def test_sources_name_no_type_that_some_compilers_lack() -> None:
    """_Float16 is unknown to gcc before 12 and clang before 15 on x86."""
    texts = {path.name: path.read_text() for path in compiler.ROOT.rglob("*.[ch]")}
    assert texts and not [name for name, text in texts.items() if "_Float16" in text or "__fp16" in text]
