"""kvsketch read and kvsketch chat: a document is read once into a file, and talked about in a terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.generate import files_text, require_positions, require_writable
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, Fit, FitOption, ModelOption, QuickDtypeOption
from kvsketch.cli.output import megabytes, remarks
from kvsketch.defaults import CHUNK, METHOD, SEED, SHORT
from kvsketch.plural import counted

SAVED = ".kvs"
KINDS = "PDF, Word, PowerPoint, Excel, EPUB, HTML, Markdown or text files"
METHOD_HELP = (
    f"Compression method; see `kvsketch methods`. Default: {METHOD} for a text of {SHORT:,} tokens or "
    "more, full for a shorter one."
)
COMMANDS = "/reset clears the conversation, /cache shows the cache, /quit or Ctrl-D ends; Ctrl-C stops an answer"


def read(
    files: Annotated[
        list[Path],
        typer.Argument(help=f"{KINDS}; or folders. Several files are read as one text. - is standard input."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File for the cache; default: the document's name with .kvs.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    prefill: Annotated[
        str, typer.Option(help="exact reads the text at once; stream reads --chunk tokens at a time.")
    ] = ("exact"),
    chunk: Annotated[int, typer.Option(min=2, help="Tokens read at a time with --prefill stream.")] = CHUNK,
    fit: FitOption = Fit.AUTO,
    device: DeviceOption = None,
    dtype: QuickDtypeOption = None,
) -> None:
    """Read documents once and save the compressed cache.

    kvsketch read report.pdf --out report.kvs

    kvsketch chat report.kvs
    """
    if out is None:
        out = Path("document" if str(files[0]) == "-" else files[0].resolve().name).with_suffix(SAVED)
    require_writable(out, "--out")
    options = {"prefill": prefill, "chunk": chunk}
    talk = Talk.of_text(files_text(files), model, method, device, dtype, fit, options)
    talk.cache.save(out, {"model": model, "files": ", ".join(map(str, files))})
    talk.tell(f"read in {talk.seconds:.1f} s; saved {out}, {megabytes(out.stat().st_size)}")
    if talk.cache.promise is not None:
        talk.tell(str(talk.cache.promise))
    talk.tell(f"kvsketch chat {out}")


def chat(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Documents or folders ({KINDS}), a saved document (.kvs), or a model to chat with. "
            f"Default: {DEFAULT_MODEL}.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model for the documents; of a .kvs file only if it has moved.")
    ] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above 0 samples.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = SEED,
    fit: FitOption = Fit.AUTO,
    device: DeviceOption = None,
    dtype: QuickDtypeOption = None,
) -> None:
    """Chat with a model, or about documents.

    kvsketch chat report.kvs

    kvsketch chat report.pdf minutes.docx notes/

    kvsketch chat qwen2.5-coder-0.5b

    Several files are read as one text, with a heading for each.

    /reset clears the conversation, /cache shows the cache, /quit ends. Questions can come through a pipe, one per
    line.
    """
    import torch

    talk = _talk(targets or [DEFAULT_MODEL], model, method, device, dtype, fit)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    talk.tell(COMMANDS)
    for question in questions():
        talk.turn(question, options)


def _talk(
    targets: list[str], model: str | None, method: str | None, device: str | None, dtype: str | None, fit: Fit
) -> Talk:
    """A conversation about what was named."""
    from kvsketch.serve.files import DOCUMENTS

    paths = [Path(each) for each in targets]
    target, path = targets[0], paths[0]
    if len(paths) > 1 and (saved := [each for each in paths if each.suffix == SAVED]):
        raise ValueError(
            f"{saved[0]} is a cache that has not seen the other files, so no question is about both; read them "
            "together: `kvsketch read FILE FILE --out both.kvs`"
        )
    if path.suffix == SAVED:
        if method is not None:
            raise ValueError(f"{target} was read with a method of its own; leave out --method")
        return Talk.of_file(path, model, device, dtype)
    if all(map(_is_document, paths)):
        return Talk.of_text(files_text(paths), model or DEFAULT_MODEL, method, device, dtype, fit, {})
    missing = next(each for each in paths if not _is_document(each))
    if len(paths) > 1 or missing.suffix.lower() in DOCUMENTS:
        raise FileNotFoundError(
            f"there is no file {missing}; name documents or folders of them, or one model (`kvsketch models`)"
        )
    if model is not None:
        raise ValueError(f"{target!r} is taken for a model, and --model names another; there is no such file")
    return Talk.of_model(target, method or "full", device, dtype, fit)


def _is_document(path: Path) -> bool:
    """Whether it is a file or a folder of files, and no model."""
    if path.is_dir():
        return not (path / "config.json").is_file()
    return path.is_file() and path.suffix.lower() != ".gguf"


def questions() -> Iterator[str]:
    """What the user types, line by line, until /quit or the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


class Talk:
    """A conversation with one model; `begin` makes the cache that it starts from."""

    def __init__(self, model: Any, tokenizer: Any, begin: Callable[[], Any]) -> None:
        self.model, self.tokenizer, self.begin = model, tokenizer, begin
        self.seconds = 0.0
        self.cache = begin()

    @classmethod
    def of_model(cls, name: str, method: str, device: str | None, dtype: str | None, fit: Fit) -> Talk:
        import kvsketch
        from kvsketch.cli.first_fit import fit_first, with_auto
        from kvsketch.cli.progress import load_quick

        parsed = with_auto(method)
        model, tokenizer = load_quick(name, dtype, device)
        fit_first(model, tokenizer, parsed, name, fit)
        return cls(model, tokenizer, lambda: kvsketch.CompressedCache(model, parsed))

    @classmethod
    def of_text(
        cls,
        text: str,
        name: str,
        method: str | None,
        device: str | None,
        dtype: str | None,
        fit: Fit,
        options: dict[str, Any],
    ) -> Talk:
        """Reads a text; a conversation goes back to where it was read."""
        import copy

        import kvsketch
        from kvsketch.cli.first_fit import fit_first, with_auto
        from kvsketch.cli.progress import load_quick, reading_bar
        from kvsketch.decode import asking

        parsed = with_auto(method or METHOD)
        model, tokenizer = load_quick(name, dtype, device)
        length = asking.document_ids(tokenizer, text).shape[1]
        if method is None and length < SHORT:
            parsed = kvsketch.parse_method("full")
        require_positions(name, model, parsed, length)
        fit_first(model, tokenizer, parsed, name, fit)
        cache = kvsketch.CompressedCache(model, parsed, **options)
        start = time.perf_counter()
        with reading_bar(cache, length):
            kvsketch.read(model, tokenizer, cache, text)
        talk = cls(model, tokenizer, lambda: copy.deepcopy(cache))
        talk.seconds = time.perf_counter() - start
        talk.tell(_held(model, cache))
        return talk

    @classmethod
    def of_file(cls, path: Path, name: str | None, device: str | None, dtype: str | None) -> Talk:
        import kvsketch
        from kvsketch.cache import saving
        from kvsketch.cli.progress import load_quick

        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; make one with `kvsketch read FILE --out {path}`")
        about = saving.about(path)
        name = name or about.get("model")
        if name is None:
            raise ValueError(f"{path} does not say which model it belongs to; name it with --model")
        saved = about["dtype"] if about["dtype"] != "None" else None
        model, tokenizer = load_quick(name, dtype or saved, device)
        talk = cls(model, tokenizer, lambda: kvsketch.CompressedCache.load(path, model))
        talk.tell(f"{about.get('files', path)}: {_held(model, talk.cache)}")
        return talk

    def turn(self, line: str, options: dict[str, Any]) -> None:
        from kvsketch.cache.overview import overview

        if line == "/reset":
            self.cache = self.begin()
            self.tell("the conversation is forgotten")
        elif line == "/cache":
            self.tell("\n".join(f"{name:14} {fact}" for name, fact in overview(self.cache).items()))
        elif line.startswith("/"):
            self.tell(f"there is no {line.split()[0]}; {COMMANDS}")
        else:
            self.answer(line, options)

    def answer(self, question: str, options: dict[str, Any]) -> None:
        """Streams the answer; the conversation goes on behind it, also when it is stopped."""
        import kvsketch
        from kvsketch.cli.progress import Stoppable, StoppedByUser
        from kvsketch.decode import asking

        inputs = asking.question_inputs(self.tokenizer, self.cache, question).to(self.model.device)
        try:
            longest = self.cache.tokens_seen + inputs["input_ids"].shape[1] + options["max_new_tokens"]
            require_positions("the model", self.model, self.cache.method, longest)
        except ValueError as error:
            self.tell(f"{error}; /reset starts again")
            return
        stream, start = Stoppable(self.tokenizer), time.perf_counter()
        with _interrupts(stream.stop):
            try:
                output = kvsketch.generate(self.model, inputs, self.cache, streamer=stream, doubt=True, **options)
            except StoppedByUser:
                output = stream.ids().to(self.model.device)
        new = asking.finish(self.model, self.cache, inputs, output)
        seconds = time.perf_counter() - (stream.began or start)
        rate = f", {(len(new) - 1) / seconds:.1f} tokens/s" if len(new) > 1 and seconds > 0 else ""
        first = f"first token after {stream.began - start:.1f} s" if stream.began else "nothing"
        held = f"{counted(self.cache.tokens_seen, 'token')} seen, {megabytes(self.cache.device_bytes)} held"
        # An answer that is stopped before it begins has none.
        unsure = f"; doubt {self.cache.doubt()[0]:.2f}" if self.cache.watched is not None else ""
        self.tell(f"{first}{rate}; {held}{unsure}")

    def tell(self, text: str) -> None:
        remarks().print(text, markup=False, soft_wrap=True, style="dim")


def _held(model: Any, cache: Any) -> str:
    from kvsketch.serve.summary import full_cache_bytes

    held, full = cache.device_bytes + cache.host_bytes, full_cache_bytes(model, cache.tokens_seen)
    share = f", {held / full:.0%} of the full cache's {megabytes(full)}" if full else ""
    return f"{counted(cache.tokens_seen, 'token')} read with {cache.method}; cache {megabytes(held)}{share}"


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Inside the block Ctrl-C stops an answer between two tokens, so that the cache stays whole."""
    try:
        before = signal.signal(signal.SIGINT, lambda *_: stop())
    except ValueError:  # only the main thread handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
