"""Documents on disk: read once, found again, refused for another model, whole after a kill at any moment."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch.decode.asking import document_ids
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Request
from kvsketch.serve.text import Template
from tests.helpers import zoo
from tests.helpers.common import also
from tests.helpers.serving import settled
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT

pytest.importorskip("pydantic", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve import documents
from kvsketch.serve.documents import DocumentStore, NotReady, Unknown

METHOD = "h2o:budget=32:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep. " * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def opened(model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[Any]:
    stores: list[DocumentStore] = []

    def open_store(**options: Any) -> DocumentStore:
        options = {"folder": tmp_path / "documents", "model": model, "method": METHOD, **options}
        stores.append(DocumentStore(tokenizer=tokenizer, **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def test_a_document_on_which_the_model_overflows_is_not_kept(opened: Any, model: Any, tokenizer: Any) -> None:
    """Its questions would all be answered with nothing; others are read as before."""
    other = copy.deepcopy(model)
    other.model.embed_tokens.weight.data[tokenizer("~")["input_ids"]] = float("inf")
    for method in (METHOD, f"{METHOD}:bits=4"):
        store = opened(model=other, method=method)
        spoilt, good = (settled(store, store.add(text).id) for text in (TEXT + "~", TEXT))
        assert spoilt.status == "failed" and "not finite" in spoilt.error
        assert good.status == "ready"


def test_a_document_is_read_once_and_found_after_a_restart(opened: Any, model: Any, tokenizer: Any) -> None:
    store = opened()
    document = settled(store, store.add(TEXT, "harbour.txt").id)
    assert (
        document.status == "ready" and document.tokens == document.tokens_read == len(tokenizer(TEXT)["input_ids"]) + 2
    )
    assert document.tokens_stored == 32 and document.slots == [[32, 32], [32, 32]]
    assert 0 < document.device_bytes < document.full_bytes
    assert store.add(TEXT).id == document.id and len(store.documents()) == 1
    store.close()
    again = opened()
    assert again.get(document.id) == document and again.text(document.id) == TEXT
    ids = Template(tokenizer).after_document([{"role": "user", "content": "How deep?"}])
    engine = BatchedEngine(model, "full", rows=1)
    answer = engine.submit(Request(tuple(ids), 8, document=again.cache(document.id)))
    cache = kvsketch.CompressedCache(model, METHOD)
    kvsketch.read(model, tokenizer, cache, TEXT)
    expected = kvsketch.ask(model, tokenizer, cache, "How deep?", max_new_tokens=8, eos_token_id=None)
    assert tokenizer.decode(list(answer), skip_special_tokens=True) == expected
    engine.close()
    runs = again.passages(document.id)
    assert [runs[0][0], runs[-1][1]] == [0, len(TEXT)] and all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    levels = [level for _, _, level in runs]
    assert levels[0] == levels[-1] == 8 and min(levels) == 0, "sinks and recent tokens are in all heads"
    again.delete(document.id)
    assert again.documents() == []
    with pytest.raises(Unknown):
        again.cache(document.id)


def test_documents_that_are_not_asked_about_leave_the_memory(opened: Any) -> None:
    first = opened()
    numbers = [settled(first, first.add(TEXT + each).id).id for each in "abc"]
    one = first.cache(numbers[0]).device_bytes
    store = opened(most_bytes=2 * one)
    a, b = (store.cache(number) for number in numbers[:2])
    assert store.cache(numbers[0]) is a, "both fit"
    c = store.cache(numbers[2])
    assert store.cache(numbers[0]) is a and store.cache(numbers[2]) is c
    d = store.cache(numbers[1])
    assert d is not b, "the one that was used least recently is read from its file"
    assert store.cache(numbers[2]) is c
    store.delete(numbers[2])
    assert store.cache(numbers[0]) is not a and store.cache(numbers[1]) is d, "one that is deleted takes no memory"
    small = opened(most_bytes=one // 2)
    assert small.cache(numbers[0]) is small.cache(numbers[0]), "the last one stays, however large it is"


def test_a_short_document_that_names_no_method_is_kept_whole(opened: Any, model: Any, tokenizer: Any) -> None:
    tokens = document_ids(tokenizer, TEXT).shape[1]
    store = opened(whole_below=tokens + 1)
    result = settled(store, store.add(TEXT).id)
    assert result.method == "full" and result.tokens_stored == tokens and result.device_bytes == result.full_bytes
    assert store.add(TEXT, method="full").id == result.id, "the same text, the same method: the same document"
    named = settled(store, store.add(TEXT, method=METHOD).id)
    assert named.method == METHOD and named.tokens_stored < tokens
    longer = opened(whole_below=tokens, folder=store.folder)
    assert longer.add(TEXT).id == named.id


def test_a_document_takes_its_full_twin_along_and_no_other(opened: Any) -> None:
    store = opened()
    full, small, other = (store.add(*args).id for args in ((TEXT, "", "full"), (TEXT,), (TEXT[::-1], "", "full")))
    for each in (full, small, other):
        assert settled(store, each).status == "ready"
    assert store.delete(small) == [small, full]
    assert [each.id for each in store.documents()] == [other]
    small, full = store.add(TEXT).id, store.add(TEXT, method="full").id
    assert store.delete(full) == [full] and store.get(small)


def test_pages_and_notes_stay_with_a_document(opened: Any) -> None:
    store = opened()
    plain, paged = (
        store.add(TEXT).id,
        store.add(TEXT, "a.pdf", None, ((0, "page 1"), (9, "page 2")), "read as Latin-1").id,
    )
    assert plain != paged and store.add(TEXT, "a.pdf", None, ((0, "page 1"), (9, "page 2"))).id == paged
    store.close()
    again = opened()
    assert again.places(paged) == [(0, "page 1"), (9, "page 2")] and again.places(plain) == []
    assert again.get(paged).note == "read as Latin-1" and again.get(plain).note is None


def test_a_client_names_the_method_as_the_server_was_given_it(opened: Any) -> None:
    asked = "h2o:bytes=1/2:sinks=2:recent=8"
    store = opened(method=asked)
    assert store.method.bytes is None and store.method.budget.share is not None
    assert store.written(asked) == str(store.method) == store.written(str(store.method)) != asked
    assert store.add(TEXT, method=asked).id == store.add(TEXT).id
    assert (store.written("h2o:bytes=1/5000"), store.written("nonsense")) == ("h2o:bytes=1/5000", "nonsense")


def test_a_client_names_no_file_of_the_server(opened: Any) -> None:
    with pytest.raises(ValueError, match="map=/etc/passwd names a file of the server; leave it out"):
        opened().add(TEXT, method="rehearse:replay=learned:map=/etc/passwd")


def test_a_document_belongs_to_its_model(opened: Any) -> None:
    number = opened().add(TEXT).id
    other = opened(model=zoo.build("llama", vocab_size=257))
    assert settled(other, number).status == "other_model"
    with pytest.raises(ValueError, match="another model: the same shape, but other weights"):
        other.cache(number)
    with pytest.raises(Unknown):
        other.get("../../etc/passwd")


def test_what_is_being_read_can_be_deleted_and_is_read_again_after_a_stop(opened: Any, model: Any) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        reached.set()
        assert go_on.wait(LONGEST_WAIT)

    hook = model.model.layers[0].register_forward_pre_hook(hold)
    store = opened()
    first = store.add(TEXT)
    assert reached.wait(LONGEST_WAIT)
    with pytest.raises(NotReady, match="is being read: 0 of"):
        store.cache(first.id)
    store.delete(first.id)
    second = store.add(TEXT + "More.")
    go_on.set()
    hook.remove()
    assert settled(store, second.id).status == "ready" and [each.id for each in store.documents()] == [second.id]
    # A stop before the end of reading leaves the text: the next process reads it.
    (store.folder / second.id / "cache.kvs").unlink()
    assert settled(opened(), second.id).status == "ready"


def test_facts_of_another_version_hide_no_document(opened: Any, tmp_path: Path) -> None:
    store = opened()
    document = settled(store, store.add(TEXT).id)
    path = tmp_path / "documents" / document.id / "document.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert store.get(document.id) == document
    path.write_text('{"id": 1}')
    assert store.documents() == []
    with pytest.raises(Unknown, match="there is no document"):
        store.get(document.id)


WRONG: list[Any] = [None, "text", "\ud800", 7, 0.5, float("nan"), True, [], [[1.5]], {}, {"a": 1}]


@pytest.mark.parametrize("name", ["document.json", "held.json"])
def test_a_damaged_file_hides_no_other_document(opened: Any, tmp_path: Path, name: str) -> None:
    store = opened()
    other = settled(store, store.add(TEXT + "Another.").id)
    damaged = settled(store, store.add(TEXT).id)
    path = tmp_path / "documents" / damaged.id / name
    whole = json.loads(path.read_text())
    contents = [json.dumps({**whole, key: value}) for key in whole for value in WRONG]
    for content in (*contents, "", "{", "[]", "[" * 100_000, b"\xff".decode("latin-1")):
        path.write_text(content)
        result = store.documents()
        assert other in result, content
        json.dumps([asdict(each) for each in result], allow_nan=False, ensure_ascii=False).encode()
    path.write_text("{}")
    left = {other.id} if name == "document.json" else {other.id, damaged.id}
    assert {each.id for each in opened().documents()} == left
    # The text sent again makes it whole.
    assert settled(store, store.add(TEXT).id).status == "ready" and len(store.documents()) == 2


@pytest.mark.parametrize("link", ["", "document.json", "text.txt", "cache.kvs"])
def test_a_link_is_not_followed(opened: Any, tmp_path: Path, link: str) -> None:
    store = opened()
    document = settled(store, store.add(TEXT).id)
    store.close()
    path, elsewhere = tmp_path / "documents" / document.id / link, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    (tmp_path / "documents" / "doc-nothing").symlink_to(tmp_path / "gone")
    before = {each: each.read_bytes() for each in elsewhere.parent.rglob("elsewhere*/**/*") if each.is_file()}
    if elsewhere.is_file():
        before[elsewhere] = elsewhere.read_bytes()
    again = opened()
    if link != "cache.kvs":
        assert again.documents() == []
        for use in (again.text, again.cache, again.delete):
            with pytest.raises(Unknown):
                use(document.id)
    # The text sent again takes the place of the link.
    assert settled(again, again.add(TEXT).id).status == "ready"
    assert not path.is_symlink() and {each: each.read_bytes() for each in before} == before


def test_a_lock_that_is_a_link_is_not_followed(opened: Any, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "documents", tmp_path / "elsewhere"
    store = opened()
    number = settled(store, store.add(TEXT).id).id
    store.delete(number)
    elsewhere.write_text("kept")
    (folder / ".locks" / number).unlink(missing_ok=True)
    (folder / ".locks" / number).symlink_to(elsewhere)
    assert settled(store, store.add(TEXT).id).status == "ready" and elsewhere.read_text() == "kept"


def test_a_document_may_be_deleted_and_sent_again_before_its_reading_has_ended(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready when its file is there; the thread that has read it comes to its end a little later."""
    goes_on, store = threading.Event(), opened()
    monkeypatch.setattr(documents.log, "info", lambda *words: goes_on.wait(LONGEST_WAIT))
    number = settled(store, store.add(TEXT).id).id
    store.delete(number)
    assert store.add(TEXT).status == "waiting"
    goes_on.set()
    assert settled(store, number).status == "ready" and settled(store, store.add(TEXT + " More.").id).status == "ready"


def test_a_full_disk_leaves_nothing_half_made(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    calls: Iterator[int] = iter(())

    def full_at(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and next(calls, 1) == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("mkdir", "open", "fsync", "replace"):
        full_at(name)
    errors = []
    for moment in range(100):
        calls = iter(range(moment, -1, -1))
        try:
            document = store.add(TEXT)
            break
        except OSError as error:
            errors.append(error.errno)
        assert [path.name for path in store.folder.iterdir()] == [".locks"]
    assert len(errors) > 4 and set(errors) == {errno.ENOSPC} and settled(store, document.id).status == "ready"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from kvsketch.serve.documents import DocumentStore
from tests.helpers.serving import settled

tiny, folder, text, step = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)

def child(moment):
    calls = 0
    def counting(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call
    for name in ("open", "replace", "mkdir", "fsync", "unlink"):
        setattr(os, name, counting(getattr(os, name)))
    store = DocumentStore(Path(folder) / str(moment), model, tokenizer, "h2o:budget=32:sinks=2:recent=8")
    status = settled(store, store.add(text).id).status
    store.close()
    os._exit(0 if status == "ready" else 3)

for moment in range(1, 100, int(step)):
    pid = os.fork()
    if not pid:
        child(moment)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit(f"unexpected end {status}" if status else 0)
"""


@pytest.mark.parametrize("step", [7, *also(3)])
def test_a_kill_leaves_no_broken_document(opened: Any, tiny: Path, tmp_path: Path, step: int) -> None:
    """Processes are killed in front of system calls that changes files; what they leave is whole or not there."""
    folder = tmp_path / "documents"
    command = [sys.executable, "-c", KILLED, str(tiny), str(folder), TEXT, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    left = sorted(folder.iterdir())
    assert len(left) > 4
    for each in left:
        store = opened(folder=each)
        for document in store.documents():
            assert settled(store, document.id).status == "ready"
            assert store.cache(document.id).tokens_seen == document.tokens
        # A file is ready a moment before the folder that it was made in has gone.
        store.close()
        names = [path.name for path in each.rglob("*")]
        assert not [name for name in names if name.endswith(".tmp") or name.startswith((".new", ".gone"))]
