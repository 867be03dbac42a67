"""The text of a PDF, in a process of its own: `python -P pdf.py PAGES CHARACTERS SECONDS MEMORY < FILE`, 0: no limit.

Some PDFs of a few kilobytes take minutes or gigabytes, so `files.text_of` runs this file and ends it when it takes too
long. It imports the standard library and pypdf alone, to start fast, and prints JSON: the text, or why there is none.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any


def main() -> None:
    pages, characters, seconds, memory = (int(word) for word in sys.argv[1:])
    limit_process(seconds, memory)
    logging.getLogger("pypdf").setLevel(logging.ERROR + 1)  # what matters of its remarks is in the error below
    try:
        import pypdf

        text = "\n\n".join(texts(pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read())), pages, characters))
        # Halves of surrogate pairs find their other half, or become U+FFFD.
        answer({"text": text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")})
    except ModuleNotFoundError as error:
        answer({"missing": str(error)})
    except TooMuch as error:
        answer({"limit": str(error)})
    except MemoryError:
        answer({"limit": "memory"})
    except Exception as error:  # a damaged or locked file fails in many ways
        answer({"error": f"{type(error).__name__}: {error}"})


class TooMuch(Exception):
    """The name of a limit that a file exceeds."""


def texts(reader: Any, most_pages: int, most_characters: int) -> Iterator[str]:
    """The text of each page; TooMuch for a file with more than the most pages or characters, 0: no limit."""
    characters = 0
    for number, page in enumerate(reader.pages, 1):
        if most_pages and number > most_pages:
            raise TooMuch("pages")
        text = page.extract_text()
        characters += len(text)
        if most_characters and characters > most_characters:
            raise TooMuch("characters")
        yield text


def limit_process(seconds: int, memory: int) -> None:
    """The operating system's own limits, where it has them: they hold even when nobody is left to end this process."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(what)[1]
        if most and (hard == resource.RLIM_INFINITY or most < hard):
            try:
                resource.setrlimit(what, (most, hard))
            except (OSError, ValueError):  # macOS has the names, not the limits
                continue


def answer(content: dict[str, str]) -> None:
    json.dump(content, sys.stdout)


if __name__ == "__main__":
    main()
