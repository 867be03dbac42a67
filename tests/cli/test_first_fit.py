"""The first fit of a model, by the commands that read a text: once, in one process, whole or not at all."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvsketch import CompressedCache, models, prefill
from kvsketch.cache import learning
from kvsketch.cache.replay import fitting
from kvsketch.cli import app, first_fit
from kvsketch.cli.boundary import one_line
from kvsketch.cli.options import Fit
from kvsketch.methods import parse_method
from kvsketch.models import fit_texts
from kvsketch.models.files import locked
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT, join_all

TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep.\n" * 4
METHOD = "rehearse:budget=1/2:chunk=64:sinks=2:recent=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    return models.load(folder, device="cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests: programs for the CPU are compiled once."""
    return tmp_path_factory.mktemp("first")


@pytest.fixture
def home(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fetched files without maps, and fits of a few tokens."""
    monkeypatch.setenv("KVSKETCH_HOME", str(root / "home"))
    monkeypatch.setenv("KVSKETCH_FIT", "always")
    monkeypatch.setattr(first_fit, "CPU_FIT_TOKENS", 512)
    monkeypatch.setattr(first_fit, "CPU_FIT_LENGTH", 256)
    shutil.rmtree(root / "home" / "maps", ignore_errors=True)
    (root / "page.txt").write_text(TEXT)
    return root


def run(*args: str, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, list(args), input=text)
    assert done.exit_code == 0, done.output
    return done


def read(home: Path, folder: str, *more: str, method: str = METHOD) -> Any:
    out = ("--out", str(home / "page.kvs"), "--model", folder, "--device", "cpu")
    return run("read", str(home / "page.txt"), *out, "--method", method, *more)


def files(home: Path) -> list[Path]:
    return [path for path in (home / "home" / "maps").glob("*") if path.suffix != ".lock"]


def test_the_first_read_fits_the_model_and_the_next_does_not(home: Path, folder: str, loaded: Any) -> None:
    first = read(home, folder)
    assert "fitting" in first.stderr and "--fit never leaves it out" in one_line(first.stderr)
    assert "fitted to 512 tokens" in first.stderr and "replay=learned" in first.stderr
    assert [path.suffix for path in files(home)] == [".safetensors"]  # no part of a file
    assert "replay=learned" in str(CompressedCache.load(home / "page.kvs", loaded[0]).method)
    again = read(home, folder)
    assert "fitt" not in again.stderr and "replay=learned" in again.stderr
    talk = run(
        "chat", str(home / "page.txt"), "--model", folder, "--method", METHOD, "--max-new-tokens", "2", text="/cache\n"
    )
    assert "replay=learned" in talk.stderr and "fitt" not in talk.stderr
    cache = CompressedCache(loaded[0], f"{METHOD}:replay=auto")
    assert cache.method.learned is not None and "replay=learned" in str(cache.method)  # type: ignore[attr-defined]
    prefill(loaded[0], torch.arange(90)[None], cache)
    assert cache.describe().endswith("replay=auto: learned, with the maps of this model")


@pytest.mark.parametrize("named", ["replay=virtual", "replay=exact"])
def test_a_replay_that_is_named_stays(named: str, home: Path, folder: str) -> None:
    done = read(home, folder, method=f"{METHOD}:{named}")
    assert "fitt" not in done.stderr and files(home) == []
    assert ("learned" in done.stderr) is False


def test_nothing_is_fitted_where_nothing_asks_for_it(home: Path, folder: str) -> None:
    assert "fitt" not in read(home, folder, method="h2o:budget=64:sinks=2:recent=8").stderr
    assert "fitt" not in run("read", str(home / "page.txt"), "--model", folder, "--out", str(home / "a.kvs")).stderr
    assert "fitt" not in run("chat", folder, "--max-new-tokens", "2", text="Hello\n").stderr
    assert files(home) == []


def test_a_chat_with_rehearse_fits_too(home: Path, folder: str) -> None:
    talk = run("chat", folder, "--method", METHOD, "--max-new-tokens", "2", "--device", "cpu", text="Hello\n")
    assert "fitted to 512 tokens" in talk.stderr and len(files(home)) == 1


def test_never_leaves_the_fit_out_and_says_what_that_costs(home: Path, folder: str, loaded: Any) -> None:
    done = read(home, folder, "--fit", "never")
    assert "--fit never: replay is virtual, which keeps less" in one_line(done.stderr) and files(home) == []
    assert "replay=virtual" not in done.stderr.splitlines()[0] and "learned" not in done.stderr
    cache, plain = CompressedCache(loaded[0], f"{METHOD}:replay=auto"), CompressedCache(loaded[0], METHOD)
    ids = torch.arange(90)[None]
    prefill(loaded[0], ids, cache)
    prefill(loaded[0], ids, plain)
    assert cache.describe() == (
        f"{plain.describe()}\nreplay=auto: virtual, for this model has no maps; `kvsketch fit MODEL` makes them"
    )
    wrong = CliRunner().invoke(app, ["read", str(home / "page.txt"), "--fit", "often"])
    assert wrong.exit_code == 2 and "'often' is not one of 'auto', 'always', 'never'" in one_line(wrong.output)


def test_a_fit_that_would_take_long_says_how_to_do_it(home: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_fit, "seconds_of_fit", lambda *_: 400.0)
    assert "fit" not in read(home, folder, "--fit", "auto").stderr and files(home) == [], "a CPU, unless it is asked to"
    monkeypatch.setattr(first_fit, "by_itself", lambda device: True)
    done = one_line(read(home, folder, "--fit", "auto").stderr)
    assert f"`kvsketch fit {folder}` changes that, once, in about 7 minutes" in done and files(home) == []
    fitted = run("fit", folder, "--device", "cpu", "--doubt-questions", "10")
    assert "fitted to 512 tokens" in fitted.stdout and "use rehearse:replay=learned" in one_line(fitted.stdout)
    assert "replay=learned" in read(home, folder).stderr


def test_the_time_of_a_fit_grows_with_its_tokens(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, own, now = torch.zeros(1, 200, dtype=torch.int64), first_fit.prefill, [0.0]

    def reads(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        now[0] += 0.002 * ids.shape[1]
        return own(model, ids, cache)

    monkeypatch.setattr(first_fit, "prefill", reads)
    monkeypatch.setattr(first_fit.time, "perf_counter", lambda: now[0])
    for parts in (1, 10**4):
        seconds = first_fit.seconds_of_fit(loaded[0], [ids] * parts)
        assert seconds == pytest.approx(0.002 * 200 * parts * first_fit.READINGS)


def test_a_gpu_times_a_text_as_long_as_those_of_the_fit(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long for 128 tokens as for 4,096: a fit of half a minute would be expected to take an hour."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert first_fit.probe_lengths(gpu, 4096) == (4096, 4096) and first_fit.probe_lengths(cpu, 4096)[1] < 512
    now, read, lengths = [0.0], [], first_fit.probe_lengths

    def reads(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        read.append(ids.shape[1])
        now[0] += 0.5 if len(read) == 1 else 0.1  # whatever the length, the first one slower
        return torch.zeros(1)

    monkeypatch.setattr(first_fit, "prefill", reads)
    monkeypatch.setattr(first_fit, "probe_lengths", lambda device, part: lengths(gpu, part))
    monkeypatch.setattr(first_fit.time, "perf_counter", lambda: now[0])
    parts = [torch.zeros(1, 400, dtype=torch.int64)] * 10
    assert first_fit.seconds_of_fit(loaded[0], parts) == pytest.approx(0.1 * 10 * first_fit.READINGS)
    assert read == [400, 400]


def test_an_interrupted_fit_goes_on_where_it_stopped(home: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    method, own, done = first_fit.with_auto(METHOD), learning._of_text, []

    def count(*args: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(args)
        return own(*args)

    monkeypatch.setattr(learning, "_of_text", count)
    with pytest.raises(KeyboardInterrupt):
        first_fit.fit_first(model, tokenizer, method, "tiny", Fit.ALWAYS)
    assert [path.suffix for path in files(home)] == [".part"]
    assert CompressedCache(model, method).method.learned is None  # type: ignore[attr-defined]
    done.append("from here on")
    first_fit.fit_first(model, tokenizer, method, "tiny", Fit.ALWAYS)
    assert len(done) == 2 + 3 and [path.suffix for path in files(home)] == [".safetensors"]  # two texts, twice


def test_a_second_process_waits_for_the_file_of_the_first(
    home: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    path = fitting.default_path(CompressedCache(model).identity.describe())
    calls, waits = [], threading.Event()
    monkeypatch.setattr(learning, "learn", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(first_fit, "locked", lambda path: waits.set() or locked(path))
    waiting = threading.Thread(
        target=first_fit.fit_first, args=(model, tokenizer, first_fit.with_auto(METHOD), "tiny", Fit.ALWAYS)
    )
    with locked(path):
        waiting.start()
        assert waits.wait(LONGEST_WAIT) and waiting.is_alive() and not calls
        maps = fitting.ReplayMap({0: torch.zeros(4, 18, 8)}, {0: torch.zeros(2, 8, 1)})
        fitting.save(path, fitting.Learned(maps, None), CompressedCache(model).identity.describe())
    join_all([waiting])
    assert not calls


def test_a_fit_that_fails_does_not_stop_the_command(home: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(learning, "learn", fail)
    done = read(home, folder)
    assert "the fit failed (out of memory); replay is virtual" in one_line(done.stderr) and files(home) == []


def test_a_damaged_file_is_made_again(home: Path, folder: str, loaded: Any) -> None:
    path = fitting.default_path(CompressedCache(loaded[0]).identity.describe())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a file")
    assert "replay=learned" in read(home, folder).stderr and path.stat().st_size > 1000


def test_only_a_text_that_names_no_replay_gets_auto() -> None:
    assert str(first_fit.with_auto("rehearse:bytes=1/8")) == "rehearse:replay=auto:bytes=1/8"
    for text in ("rehearse:replay=virtual", "rehearse:replay=exact", "kvzip", "full"):
        assert first_fit.with_auto(text) == parse_method(text)


def test_the_own_texts_are_the_same_every_time_and_of_all_sorts(loaded: Any) -> None:
    texts = fit_texts.texts()
    assert texts == fit_texts.texts() and all(300 < len(text) <= fit_texts.CHARACTERS for text in texts.values())
    assert len(texts) == 10 + len(fit_texts.PROSE) + len(fit_texts.CODE) + fit_texts.MIXED
    parts = fit_texts.parts(loaded[1], 1000, 256)
    assert [part.shape for part in parts] == [(1, 256)] * 3  # the last 232 are too few
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 3
