"""Time to the first token of an answer about a document: read again, from its file, and held ready.

    kvsketch bench document --model qwen2.5-coder-0.5b --tokens 8192 --out results/document.jsonl

`read again` reads the document and the question, as a server without documents does for every request. `from its file`
loads the saved cache and reads the question alone. `held ready` copies a cache that is in memory already, as
`kvsketch serve` does for a document that was asked about before. All three make the same first token, or nothing is
reported. Runs on any device; the model is real.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsketch import CompressedCache, prefill
from kvsketch.decode.asking import document_ids, question_inputs
from kvsketch.methods import parse_method
from kvsketch_lab.benchmark.runner import FAILED, Fields
from kvsketch_lab.benchmark.shapes import TextBenchmark
from kvsketch_lab.options import option

QUESTION = "What does the text say about energy? Answer in one sentence."


class DocumentQuestion:
    """One model, a text of so many tokens and a question about it."""

    def __init__(self, model: Any, tokenizer: Any, text: str, tokens: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        frame = document_ids(tokenizer, "").shape[1]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: max(1, tokens - frame)]
        if len(ids) + frame < tokens:
            raise ValueError(f"the text has {len(ids)} tokens; use a smaller --tokens")
        self.document = document_ids(tokenizer, tokenizer.decode(ids)).to(model.device)

    def read(self, method: str) -> CompressedCache:
        cache = CompressedCache(self.model, method)
        prefill(self.model, self.document, cache)
        cache.text.open = True
        return cache

    def first_token(self, cache: CompressedCache) -> int:
        """The first token of the answer; it is there when the device is done."""
        question = question_inputs(self.tokenizer, cache, QUESTION)["input_ids"].to(self.model.device)
        return int(prefill(self.model, question, cache).argmax())


def timed(make: Callable[[], CompressedCache], asked: DocumentQuestion, repeats: int) -> tuple[list[float], set[int]]:
    """Seconds from a request to its first token, each time anew, and the tokens."""
    times, tokens = [], set()
    for _ in range(repeats):
        start = time.perf_counter()
        tokens.add(asked.first_token(make()))
        times.append(time.perf_counter() - start)
    return times, tokens


@dataclass
class Document(TextBenchmark):
    name, kind, title = "document", "document", "Time to the first token of an answer about a document"
    columns = (
        "method | tokens:,d | cache | first token s=seconds:.2f | times faster=faster:,.0f | "
        "file MB=file_bytes/1e6:,.1f | cache MB=cache_bytes/1e6:,.1f"
    )
    methods: str = option("full,rehearse:budget=1/2,snapkv:budget=25%", "methods, separated by commas")
    tokens: tuple[int, ...] = option("8192", "tokens of the document, separated by commas", least=64)
    repeats: int = option(3, "questions asked of a stored document", least=1)

    def cells(self) -> list[Fields]:
        methods = [text.strip() for text in self.methods.split(",")]
        for method in methods:
            parse_method(method)
        return [{"model": self.model, "method": m, "tokens": n} for m in methods for n in self.tokens]

    def measure(self, model: str, method: str, tokens: int) -> Iterator[Fields]:
        asked = DocumentQuestion(*self.loaded, tokens)
        shared = {"model": model, "method": method, "tokens": tokens, "repeats": self.repeats}
        shared |= {"dtype": str(asked.model.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        start = time.perf_counter()
        cache = asked.read(method)
        self.on.synchronize()
        reading = time.perf_counter() - start
        # One reading serves all: its question is asked of a copy that is made beforehand.
        copied = copy.deepcopy(cache)
        (asking,), wanted = timed(lambda: copied, asked, 1)
        again = [reading + asking]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "document.kvs"
            cache.save(file)
            sizes = {"file_bytes": file.stat().st_size, "cache_bytes": cache.device_bytes + cache.host_bytes}
            stored, from_file = timed(lambda: CompressedCache.load(file, asked.model), asked, self.repeats)
        held, from_memory = timed(lambda: copy.deepcopy(cache), asked, self.repeats)
        for name, times, result in (
            ("read again", again, wanted), ("from its file", stored, from_file), ("held ready", held, from_memory),
        ):  # fmt: skip
            row = {**shared, **sizes, "cache": name, "seconds": statistics.median(times), "times": times}
            yield (
                row if result == wanted else {**row, FAILED: "another first token than from the document read again"}
            )

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        base = next(each for each in rows if each["method"] == row["method"] and each["tokens"] == row["tokens"])
        return {"faster": base["seconds"] / row["seconds"]}
