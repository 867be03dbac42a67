"""Sources of LongBench's rows and prompts; kvsketch contains neither its texts nor its prompts.

rows      a folder of `<task>.jsonl`, LongBench's `data.zip`, or that file from the hub
prompts   `longbench`: config/dataset2prompt.json of the user's folder; `lm-eval`: the tasks of an installed lm-eval;
          `kvsketch`: templates of our own, of the same form. Scores compare only under the same prompts
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvsketch_lab.evaluation.longbench.metrics import optional
from kvsketch_lab.evaluation.longbench.tasks import TASKS, Task, task_of

HUB_REPOSITORY, HUB_FILE = "THUDM/LongBench", "data.zip"
PROMPT_SOURCES = ("longbench", "lm-eval", "kvsketch")


class Row(NamedTuple):
    """A question with its document; `length` counts words (characters in Chinese), as LongBench gives it."""

    identity: str
    context: str
    input: str
    answers: list[str]
    classes: list[str]
    length: int


class Prompts(NamedTuple):
    """Templates with {context} and {input} by task, answer lengths by task, and where they come from."""

    source: str
    templates: dict[str, str]
    lengths: dict[str, int]

    def fill(self, task: Task, row: Row) -> str:
        """The prompt of a row; braces inside a document stay as they are."""
        if task.name not in self.templates:
            raise ValueError(f"the prompts of {self.source} have none for {task.name}; use --prompts kvsketch")
        parts = {"context": row.context, "input": row.input}
        return re.sub(r"\{(context|input)\}", lambda match: parts[match[1]], self.templates[task.name])


def prompts(source: str, data: str) -> Prompts:
    """The templates of a source; `auto` takes the first there is of: the data folder's, lm-eval's, our own."""
    ours = Prompts(
        "kvsketch", {n: t.template for n, t in TASKS.items()}, {n: t.max_new_tokens for n, t in TASKS.items()}
    )
    if source == "kvsketch":
        return ours
    readers = {"longbench": lambda: _from_folder(Path(data).expanduser()), "lm-eval": _from_lm_eval}
    if source != "auto" and source not in readers:
        raise ValueError(f"unknown prompts {source!r}; choose one of: auto, {', '.join(PROMPT_SOURCES)}")
    for name in readers if source == "auto" else (source,):
        found = readers[name]()
        if found is not None:
            return Prompts(name, found, ours.lengths | _lengths(data, name))
    if source == "longbench":
        raise FileNotFoundError(
            f"{data} has no config/dataset2prompt.json; copy the config folder of the LongBench repository there, "
            "or use --prompts lm-eval or kvsketch"
        )
    if source == "lm-eval":
        raise ImportError("lm-eval is not installed: pip install 'kvsketch[eval]', or use --prompts kvsketch")
    return ours


def _config(folder: Path, name: str) -> Any:
    file = next((f for f in (folder / "config" / name, folder / name) if f.is_file()), None)
    return json.loads(file.read_text(encoding="utf-8")) if file else None


def _from_folder(folder: Path) -> dict[str, str] | None:
    found = _config(folder, "dataset2prompt.json")
    return None if found is None else {name: text for name, text in found.items() if name in TASKS}


def _lengths(data: str, source: str) -> dict[str, int]:
    found = _config(Path(data).expanduser(), "dataset2maxlen.json") if source == "longbench" else None
    return {name: int(length) for name, length in (found or {}).items() if name in TASKS}


def _from_lm_eval() -> dict[str, str] | None:
    """The templates of lm-eval's LongBench tasks, read from its files: lm-eval itself takes seconds to import."""
    spec = importlib.util.find_spec("lm_eval")
    folder = Path(next(iter(spec.submodule_search_locations or []), "")) if spec else None
    if folder is None or not (folder / "tasks" / "longbench").is_dir():
        return None
    yaml: Any = optional("yaml", "PyYAML")
    loader: Any = type("TaskLoader", (yaml.SafeLoader,), {"__doc__": "Reads a task without the functions it names."})
    loader.add_multi_constructor("!function", lambda _loader, _suffix, _node: None)
    found: dict[str, str] = {}
    for name in TASKS:
        file = folder / "tasks" / "longbench" / f"{name}.yaml"
        if file.is_file():
            text = yaml.load(file.read_text(encoding="utf-8"), loader)["doc_to_text"]
            found[name] = re.sub(r"\{\{\s*(context|input|question)\s*\}\}", _placeholder, text)
    return found or None


def _placeholder(match: re.Match[str]) -> str:
    return "{context}" if match[1] == "context" else "{input}"


def rows(data: str, name: str) -> list[Row]:
    """The rows of a task from a folder, a zip file or the hub."""
    task_of(name)
    source = _hub_file() if data == "hub" else Path(data).expanduser()
    if source.is_dir():
        file = next((f for f in (source / f"{name}.jsonl", source / "data" / f"{name}.jsonl") if f.is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{source} holds neither {name}.jsonl nor data/{name}.jsonl; {_what_to_download()}")
        with file.open(encoding="utf-8") as lines:
            return _unique(_read(lines, str(file)))
    if not source.is_file() or not zipfile.is_zipfile(source):
        raise FileNotFoundError(f"--data {data} is neither a folder nor a zip file; {_what_to_download()}")
    with zipfile.ZipFile(source) as archive:
        member = next((m for m in archive.namelist() if m.rpartition("/")[2] == f"{name}.jsonl"), None)
        if member is None:
            raise FileNotFoundError(f"{source} holds no {name}.jsonl; {_what_to_download()}")
        with archive.open(member) as raw:
            return _unique(_read(io.TextIOWrapper(raw, encoding="utf-8"), f"{source}:{member}"))


def _read(lines: Iterable[str], where: str) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            yield Row(
                identity=str(found.get("_id", number)),
                context=found["context"],
                input=found["input"] if "input" in found else found.get("question", ""),
                answers=[str(answer) for answer in found["answers"]],
                classes=list(found.get("all_classes") or []),
                length=int(found.get("length") or len(found["context"].split())),
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where}, line {number} is no LongBench row ({type(error).__name__}: {error}); a row is a JSON object "
                "with context, input, answers, all_classes, length and _id"
            ) from None


def _unique(found: Iterable[Row]) -> list[Row]:
    """The rows, each with an identity of its own."""
    times: Counter[str] = Counter()
    result = []
    for row in found:
        times[row.identity] += 1
        again = times[row.identity]
        result.append(row if again == 1 else row._replace(identity=f"{row.identity}#{again}"))
    return result


def _hub_file() -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(HUB_REPOSITORY, HUB_FILE, repo_type="dataset"))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(f"LongBench could not be fetched ({reason}); {_what_to_download()}") from error


def _what_to_download() -> str:
    return f"download {HUB_FILE} of the data set {HUB_REPOSITORY} from the Hugging Face hub and give it as --data"
