"""Random and spoilt input to everything that reads text or files: a clear error or a right answer, nothing else.

KVSKETCH_FUZZ=5000 tries that many inputs of each kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

import kvsketch
from kvsketch import CompressedCache, models
from kvsketch.cache.saving import sealed_file
from kvsketch.cli import app
from kvsketch_lab import records
from kvsketch_lab.commands import BENCHMARKS, EXPERIMENTS
from tests.helpers import zoo

INPUTS = int(os.environ.get("KVSKETCH_FUZZ", "40"))
quickly = settings(
    max_examples=INPUTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAMES = st.sampled_from([*kvsketch.METHODS, "", "best", "Full"])
KEYS = st.sampled_from(
    [*sorted({f.name for m in kvsketch.METHODS.values() for f in dataclasses.fields(m) if f.init}), "", "size"]
)
NUMBERS = st.one_of(
    st.integers(-3, 40).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["25%", "1/8", "0%", "1/0", "101%", "9" * 30, "9" * 5000, "1e400", "-1", "٣", "0x10", "1_000"]),
)
VALUES = st.one_of(
    NUMBERS, st.sampled_from(["true", "off", "none", "host", "grow", "self", "max", ""]), st.text(max_size=5)
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda name, parts: ":".join([name, *(f"{key}={value}" for key, value in parts)]),
        NAMES,
        st.lists(st.tuples(KEYS, VALUES), max_size=4),
    ),
)


def result_or_error(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """What `work` gives, or the message of its ValueError; any other error is a mistake."""
    try:
        return work(*arguments), None
    except ValueError as error:
        return None, str(error)


@quickly
@given(TEXTS)
@example("subgen:delta=nan")
@example("streamingllm:budget=" + "9" * 5000)
def test_the_text_form_of_a_method(text: str) -> None:
    method, error = result_or_error(kvsketch.parse_method, text)
    if error is None:
        assert kvsketch.parse_method(str(method)) == method
    else:
        assert len(error) > 20


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama")


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "saved.kvs"
    cache = CompressedCache(model, "clusterkv:budget=8:sinks=2:tokens_per_cluster=4:offload=host:skip_layers=1")
    with torch.no_grad():
        model(zoo.tokens(2, 30), past_key_values=cache)
        model(zoo.tokens(2, 1), past_key_values=cache)
    cache.save(path)
    return path


@quickly
@given(data=st.data())
def test_a_spoilt_cache_file(model: Any, saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    original = bytes(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(st.sampled_from(["change", "cut", "insert", "remove"]))
        if what == "change":
            content[place] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del content[place + 1 :]
        elif what == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del content[place : place + data.draw(st.integers(1, max(1, len(content) - 1)))]
            content = content or bytearray(b"\0")
    path = tmp_path / "spoilt.kvs"
    path.write_bytes(content)
    if bytes(content) == original:
        CompressedCache.load(path, model)
        return
    with pytest.raises(ValueError, match=r"spoilt\.kvs"):
        CompressedCache.load(path, model)


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**70), st.floats(), st.text(max_size=4), st.just([]),
    st.just({}), st.just({"tensor": "0.table.keys"}), st.just({"list": [1]}), st.just({"dict": [[1, 2]]}),
    st.just({"dtype": "float32"}), st.just({"dtype": "nn"}), st.just({"store": "0.table.host"}),
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a tree of dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [result for key, value in items for result in [(*path, key), *places(value, (*path, key))]]


@quickly
@given(data=st.data())
def test_a_cache_file_whose_description_was_rewritten(
    model: Any, saved: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """The checksum is right, the content is not what any version wrote: refused, or a cache that can be asked."""
    text = sealed_file.verified(saved)
    content = json.loads(text["cache"])
    *way, last = data.draw(st.sampled_from(places(content)))
    owner = content
    for key in way:
        owner = owner[key]
    owner[last] = data.draw(PLAIN)
    path = tmp_path / "rewritten.kvs"
    text = {name: value for name, value in text.items() if name != "checksum"}
    sealed_file.write(path, load_file(saved), {**text, "cache": json.dumps(content)})
    cache, error = result_or_error(CompressedCache.load, path, model)
    if error is None:
        assert cache.tokens_stored >= 0 and cache.device_bytes > 0
    else:
        assert len(error) > 20


@quickly
@given(
    st.one_of(st.binary(max_size=60), st.lists(st.text(max_size=12), max_size=4).map(lambda s: "\n".join(s).encode()))
)
@example(b"[" * 5_000 + b"\n")
@example(b"3\n")
@example(b"\xff\n")
@example(b'{"a": ' + b"9" * 5000 + b"}\n")
def test_the_reader_of_records(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    result, error = result_or_error(lambda: list(records.read(path)))
    if error is None:
        assert all(isinstance(record, dict) for record in result)
    else:
        assert "records.jsonl, line" in error


@quickly
@given(st.text(max_size=40))
@example("a\u2028b\x85c\x0bd\r\n")
def test_a_text_in_a_record_comes_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records.jsonl"
    path.unlink(missing_ok=True)
    try:
        records.append(path, {"kind": "text", "data": {"text": text}})
    except UnicodeEncodeError:
        return
    assert [record["data"] for record in records.read(path)] == [{"text": text}]


COMMANDS = st.sampled_from([
    ["methods"], ["models"], ["models", "pull"], ["generate"], ["generate", "hi"], ["demo"], ["env"], ["report"],
    *(["bench", name] for name in BENCHMARKS), *(["eval", name] for name in EXPERIMENTS),
])  # fmt: skip
OPTIONS = st.sampled_from([
    "--json", "--help", "--model", "--method", "--methods", "--budgets", "--budgets-in", "--seeds", "--limit", "--file",
    "--out", "--seed", "--tokens", "--device", "--dtype", "--temperature", "--max-new-tokens", "--retry-failed", "--",
])  # fmt: skip
WORDS = st.one_of(
    OPTIONS, NUMBERS, TEXTS, st.sampled_from(["cpu", "abacus", "float32", "smollm2-135m", "1/8,1/4", "bytes", "0-3"])
)


@settings(quickly, max_examples=max(1, INPUTS // 4))
@given(arguments=st.builds(list.__add__, st.one_of(COMMANDS, st.just([])), st.lists(WORDS, max_size=5)))
def test_the_command_line(tmp_path: Path, arguments: list[str]) -> None:
    """No model is ever loaded or fetched here: a command that gets that far ends in that error."""

    def no_model(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no model in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for name in ("load", "resolve", "pull"):
            patch.setattr(models, name, no_model)
        result = CliRunner().invoke(app, arguments, input="")
    assert result.exit_code in (0, 2), (arguments, result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) <= 1
