"""kvsketch generate: an answer about files, a pipe or a prompt, and what it cost."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, JsonOption, ModelOption, QuickDtypeOption
from kvsketch.cli.output import megabytes, print_json, remarks
from kvsketch.defaults import CHUNK, SEED
from kvsketch.plural import counted

WHOLE = "full"
METHOD_HELP = (
    f"name:key=value:...; {WHOLE} unless given, which keeps every token: one answer needs no small cache. "
    "For long files: clusterkv:budget=1024 keeps all and reads a part; snapkv:budget=50% keeps a part and says how "
    "much. See `kvsketch methods`."
)
TEMPLATE_TOKENS = 128  # what a chat template adds at most


@dataclass(frozen=True)
class Generation:
    """A text and what it cost; full_bytes is the size of an uncompressed cache after the same tokens."""

    model: str
    method: str
    dtype: str
    device: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    peak_bytes: int | None
    peak_bytes_above_model: int | None
    tokens_seen: int
    tokens_stored: int  # by the fullest head
    tokens_per_head: int  # mean over heads and layers
    device_bytes: int
    host_bytes: int
    full_bytes: int
    doubt: float | None  # of the answer (`cache.doubt`)

    def lines(self) -> list[str]:
        """What was kept, then how fast and with how much memory."""
        host = f" + {megabytes(self.host_bytes)} in host memory" if self.host_bytes else ""
        full = "" if self.method == WHOLE else f", full cache {megabytes(self.full_bytes)}"
        kept = "all kept"
        if self.tokens_per_head < self.tokens_seen:
            mean = "" if self.tokens_per_head == self.tokens_stored else " by a head on average"
            kept = f"{self.tokens_per_head:,} kept{mean}, and what was dropped cannot be asked about"
        speeds = [f"read {counted(self.prompt_tokens, 'token')}{_rate(self.prefill_tokens_per_second)}"]
        if self.new_tokens:
            unsure = "" if self.doubt is None else f", doubt {self.doubt:.2f}"
            speeds.append(f"wrote {self.new_tokens}{_rate(self.decode_tokens_per_second)}{unsure}")
        peak = ""
        if self.peak_bytes is not None and self.peak_bytes_above_model is not None:
            above = megabytes(self.peak_bytes_above_model)
            peak = f"; peak memory {megabytes(self.peak_bytes)}, {above} above the loaded model"
        return [
            f"{self.method}: {counted(self.tokens_seen, 'token')} read, {kept}; "
            f"cache {megabytes(self.device_bytes)}{host}{full}",
            f"{', '.join(speeds)}; {self.dtype} on {self.device}{peak}",
        ]


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" at {tokens_per_second:,.1f}/s"


@dataclass(frozen=True)
class DocumentAndPrompt:
    """What to read and what to ask: a document and a question, or only a prompt."""

    document: str | None
    prompt: str | None

    @property
    def text(self) -> str:
        return "\n\n".join(part for part in (self.document, self.prompt) if part)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The question or prompt; - reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Document or folder to ask about; can be repeated. - is standard input."),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP, show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help="Memory such as 2GB: use the largest budget that fits.")] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="exact reads the prompt at once; stream reads --chunk tokens at a time, with less memory."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=2, help=f"Tokens read at a time with --prefill stream. Default: {CHUNK:,}.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the cache of the files to this file.")] = None,
    load: Annotated[Path | None, typer.Option(help="Load a saved cache and ask about its files.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above 0 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = SEED,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    device: DeviceOption = None,
    dtype: QuickDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question about files, a pipe or a saved cache, or continue a prompt.

    kvsketch generate --file report.txt "What does it say about costs?"

    cat report.txt | kvsketch generate "What does it say about costs?"

    The answer goes to standard output; tokens stored, speed and memory go to standard error.
    """
    if load is not None:
        given = {
            "--file": file, "--method": method, "--memory": memory, "--prefill": prefill, "--chunk": chunk,
            "--save": save, "--raw": raw,
        }  # fmt: skip
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"--load continues {load} as it was saved; leave out {', '.join(wrong)}")
        if not load.is_file():
            raise FileNotFoundError(f"there is no file {load}; make one with --file FILE --save {load}")
    if save is not None and not file:
        raise ValueError("--save saves the cache of files; name one with --file, or --file - for standard input")
    if save is not None and raw:
        raise ValueError("--save needs the chat template, to ask about the text later; leave out --raw")
    if save is not None:
        require_writable(save, "--save")
    if chunk is not None and prefill != "stream":
        raise ValueError(f"--chunk {chunk} is for --prefill stream; add that, or leave --chunk out")
    request = read_request(prompt, file or [], loaded=load is not None, saved=save is not None)

    import kvsketch
    from kvsketch.cache.chunks import require_stream
    from kvsketch.cli.progress import load_quick

    parsed = kvsketch.parse_method(method or WHOLE)
    reading: dict[str, Any] = {"prefill": prefill or "exact", "chunk": chunk or CHUNK}
    require_stream(**reading)
    loaded, tokenizer = load_quick(model, dtype, device)
    if load is not None:
        cache = kvsketch.CompressedCache.load(load, loaded)
    else:
        if memory is not None:
            asked = len(tokenizer(request.text).input_ids) + TEMPLATE_TOKENS
            reading |= {"memory": memory, "context": asked + max_new_tokens}
        cache = kvsketch.CompressedCache(loaded, parsed, seed=seed, **reading)
        if memory is not None:
            said = f"--memory {memory} for {reading['context']:,} tokens: {cache.method}"
            remarks().print(said, markup=False, soft_wrap=True)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p}
    run = Run(model, loaded, tokenizer, cache, options, seed, show=not as_json)
    generation = run.answer(request, save, raw)
    if as_json:
        print_json(dataclasses.asdict(generation))
    else:
        for line in generation.lines():
            remarks().print(line, markup=False, soft_wrap=True)


class Run:
    """One prompt or question through one model and cache."""

    def __init__(
        self, name: str, model: Any, tokenizer: Any, cache: Any, options: dict[str, Any], seed: int, show: bool
    ) -> None:
        self.name, self.model, self.tokenizer, self.cache = name, model, tokenizer, cache
        self.options, self.seed, self.show = options, seed, show

    def answer(self, request: DocumentAndPrompt, save: Path | None, raw: bool) -> Generation:
        from kvsketch.cli.progress import PeakMemory
        from kvsketch.serve.summary import full_cache_bytes

        inputs = self._inputs(request, raw, reads_first=save is not None)
        before = self.cache.tokens_seen
        require_positions(self.name, self.model, self.cache.method, before + inputs["input_ids"].shape[1])
        peak, start, reading, writing = PeakMemory(self.model.device), time.perf_counter(), 0.0, 0.0
        new: Any = []
        if save is not None:
            reading = self._read(inputs["input_ids"])
            self.cache.text.open = True
            self.cache.save(save)
            remarks().print(f"saved {save}", markup=False, soft_wrap=True)
            inputs = (
                None if request.prompt is None else self._inputs(DocumentAndPrompt(None, request.prompt), raw, False)
            )
        if inputs is not None:
            new, more, writing = self._write(inputs)
            reading += more
        prompt_tokens = self.cache.tokens_seen - before - max(0, len(new) - 1)
        return Generation(
            model=self.name,
            method=str(self.cache.method),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            text=self.tokenizer.decode(new, skip_special_tokens=True),
            prompt_tokens=prompt_tokens,
            new_tokens=len(new),
            seconds=round(time.perf_counter() - start, 3),
            prefill_tokens_per_second=round(prompt_tokens / reading, 2) if reading else None,
            decode_tokens_per_second=round((len(new) - 1) / writing, 2) if writing and len(new) > 1 else None,
            peak_bytes=peak.bytes(),
            peak_bytes_above_model=peak.growth(),
            tokens_seen=self.cache.tokens_seen,
            tokens_stored=self.cache.tokens_stored,
            tokens_per_head=self.cache.tokens_per_head,
            device_bytes=self.cache.device_bytes,
            host_bytes=self.cache.host_bytes,
            full_bytes=full_cache_bytes(self.model, self.cache.tokens_seen),
            doubt=None if self.cache.watched is None else round(self.cache.doubt()[0], 4),
        )

    def _inputs(self, request: DocumentAndPrompt, raw: bool, reads_first: bool) -> Any:
        """Inputs of the model; with `reads_first` only the document, for a question that comes later."""
        from kvsketch import models
        from kvsketch.decode import asking

        if raw:
            return self.tokenizer(request.text, return_tensors="pt")
        if request.document is not None and reads_first:
            return {"input_ids": asking.document_ids(self.tokenizer, request.document)}
        if request.document is not None and request.prompt is not None:
            return asking.document_inputs(self.tokenizer, request.document, request.prompt)
        if self.cache.tokens_seen:
            return asking.question_inputs(self.tokenizer, self.cache, request.text)
        return models.encode_chat(self.tokenizer, request.text)

    def _read(self, ids: Any) -> float:
        """Reads a document; the seconds it took."""
        import kvsketch
        from kvsketch.cli.progress import reading_bar

        start = time.perf_counter()
        with reading_bar(self.cache, ids.shape[1]):
            # Reading the last logits waits for the device.
            kvsketch.prefill(self.model, ids.to(self.model.device), self.cache).sum().item()
        return time.perf_counter() - start

    def _write(self, inputs: Any) -> tuple[Any, float, float]:
        """New tokens, and the seconds of reading and of writing."""
        import kvsketch
        from kvsketch.cli.progress import Stoppable, reading_bar

        start, prompt_tokens = time.perf_counter(), inputs["input_ids"].shape[1]
        with reading_bar(self.cache, prompt_tokens) as bar:
            stream = Stoppable(self.tokenizer, bar, self.show)
            inputs = inputs.to(self.model.device)
            seed = self.seed if self.options.get("do_sample") else None
            output = kvsketch.generate(
                self.model, inputs, self.cache, streamer=stream, seed=seed, doubt=True, **self.options
            )
        end = time.perf_counter()
        began = stream.began or end
        return output[0, prompt_tokens:], began - start, end - began


def read_request(prompt: str | None, files: list[Path], loaded: bool = False, saved: bool = False) -> DocumentAndPrompt:
    """The texts of the given files, or of a pipe; ValueError if there is nothing to read."""
    # With a named file standard input is not read: it may belong to a shell loop over files.
    piped = not files and not loaded and sys.stdin is not None and not sys.stdin.isatty()
    if prompt == "-" or (prompt is None and piped):
        prompt, piped = _standard_input(), False
    if prompt is not None and not prompt.strip():
        raise ValueError("the prompt is empty; give a prompt, --file FILE, or - to read standard input")
    document = files_text(files) if files else None
    # With a question, piped text is the document; a pipe may also be empty.
    if piped and (text := _standard_input()).strip():
        document = text
    if prompt is None and document is None:
        missing = "--load needs a question" if loaded else "there is no prompt"
        raise ValueError(f"{missing}; give one{'' if loaded else ', --file FILE'}, or - to read standard input")
    if document is None:
        return DocumentAndPrompt(None, prompt)
    return DocumentAndPrompt(None, document) if prompt is None and not saved else DocumentAndPrompt(document, prompt)


def file_text(file: Path) -> str:
    return files_text([file])


def files_text(files: list[Path]) -> str:
    """The text of files and of the documents in folders, joined under headings where there are several; - is standard
    input. ValueError for one that is empty or cannot be read. What its reader should know goes to standard error.
    """
    from kvsketch.serve.files import FileText, joined

    texts: list[tuple[str, FileText]] = []
    for file in files:
        texts += _folder_texts(file) if file.is_dir() else [_file_text(file)]
    whole = joined(texts)
    if len(texts) > 1:
        _remark(f"{len(texts)} files are read as one text, in this order: {', '.join(name for name, _ in texts)}")
    for note in whole.notes:
        _remark(note)
    return whole.text


def _folder_texts(folder: Path) -> list[Any]:
    """The documents of a folder; those that cannot be read are named and left out."""
    from kvsketch.serve.files import documents_in

    if (folder / "config.json").is_file():
        raise ValueError(f"{folder} is the directory of a model; name documents")
    taken, left = documents_in(folder)
    texts = []
    for file in taken:
        try:
            texts.append(_file_text(file))
        except (ValueError, ImportError, OSError) as error:
            _remark(f"left out: {error}")
    if left:
        kinds = ", ".join(sorted({each.suffix or each.name for each in left}))
        files = counted(len(left), "file")
        _remark(f"left out of {folder}: {files} of other kinds ({kinds}); name one to read it as text")
    if not texts:
        raise ValueError(f"{folder} holds no document that can be read; name a file")
    return texts


def _file_text(file: Path) -> tuple[str, Any]:
    from kvsketch.serve.files import FileText, read_file

    if str(file) != "-":
        return str(file), read_file(file.read_bytes(), str(file))
    text = _standard_input()
    if not text.strip():
        raise ValueError("standard input is empty; there is nothing to ask about")
    return "standard input", FileText(text)


def _remark(text: str) -> None:
    remarks().print(text, markup=False, soft_wrap=True, style="dim")


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("standard input is not UTF-8 text; convert it first")
    return text


def require_writable(path: Path, option: str) -> None:
    """Raises OSError for a place that cannot hold a file: better than after a long text has been read."""
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {option}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{option} {path}: the folder {path.parent} cannot be written; choose another")


def require_positions(name: str, model: Any, method: Any, tokens: int) -> None:
    """Raises ValueError for a prompt beyond the positions that a model was trained on."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and tokens > context and (method is None or method.read_positions != "cache"):
        raise ValueError(
            f"the prompt has {tokens:,} tokens and {name} was trained on {context:,}; longer prompts give bad answers. "
            "Shorten it, choose a model with a longer context (`kvsketch models`), or a method that reads keys at "
            "their places in the cache, such as streamingllm:budget=2048:positions=cache"
        )
