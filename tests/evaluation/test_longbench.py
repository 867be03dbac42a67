"""The LongBench experiment: tasks, data, prompts, truncation, questions as decode steps, scores, records."""

from __future__ import annotations

import importlib.util
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import models
from kvsketch_lab import records
from kvsketch_lab.evaluation.longbench import data as longbench_data
from kvsketch_lab.evaluation.longbench import encoding as longbench_encoding
from kvsketch_lab.evaluation.longbench import experiment as longbench
from kvsketch_lab.evaluation.longbench import tasks as longbench_tasks
from kvsketch_lab.evaluation.longbench.encoding import encode, question_of
from kvsketch_lab.evaluation.longbench.metrics import METRICS
from kvsketch_lab.evaluation.longbench.tasks import GROUPS, NAMES, TASKS, is_chinese, task_names, task_of
from tests.helpers.tiny import save_tiny_model

DATA = Path(__file__).parent.parent / "data" / "longbench"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    found = models.load(tiny)[1]
    found.chat_template = CHAT
    return found


def test_every_task_is_complete() -> None:
    assert len(TASKS) == 21 and len(NAMES) == 34
    assert {g: sum(t.group == g for t in TASKS.values()) for g in GROUPS} == {
        "single": 4, "multi": 4, "summary": 4, "few-shot": 4, "synthetic": 3, "code": 2,
    }  # fmt: skip
    for task in TASKS.values():
        assert task.metric in METRICS and task.max_new_tokens in (32, 64, 128, 512)
        assert task.template.count("{context}") == 1 and task.template.count("{input}") <= 1
        assert is_chinese(task) == (task.metric.endswith("_zh") or task.name in ("lsht", "passage_retrieval_zh"))
        assert task.chat == (task.group not in ("few-shot", "code"))
        assert task.first_line == (task.group == "few-shot")
    assert [n for n, t in TASKS.items() if t.max_new_tokens == 512] == ["gov_report", "qmsum", "multi_news", "vcsum"]


def test_names_of_tasks() -> None:
    assert len(task_names("all")) == 21 and len(task_names("e")) == 13 and len(task_names("english")) == 16
    assert task_names("code, qasper_e,lcc") == ["lcc", "repobench-p", "qasper_e"]
    assert task_of("qasper_e") is task_of("qasper")
    for wrong in ("squad", "narrativeqa_e", ""):
        with pytest.raises(ValueError, match=r"choose from: all, e, .*narrativeqa"):
            task_names(wrong)


def test_prompts_are_the_folders_then_lm_evals_then_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = longbench_data.Row("1", "a {input} text", "Who?", [], [], 3)
    ours = longbench_data.prompts("kvsketch", str(tmp_path))
    assert ours.fill(task_of("trec"), row).endswith("a {input} text\nWho?")
    if importlib.util.find_spec("lm_eval"):
        theirs = longbench_data.prompts("auto", str(tmp_path))
        assert theirs.source == "lm-eval" and theirs.templates.keys() == TASKS.keys()
        for name, template in theirs.templates.items():
            assert template.count("{context}") == 1 and "{{" not in template
            has_input = name not in ("lcc", "gov_report", "multi_news", "vcsum", "passage_count")
            assert ("{input}" in template) == has_input
            assert task_of(name).marker in template
    monkeypatch.setattr(longbench_data, "_from_lm_eval", lambda: None)
    assert longbench_data.prompts("auto", str(tmp_path)) == ours
    with pytest.raises(ImportError, match=r"lm-eval is not installed: pip install 'kvsketch\[eval\]'"):
        longbench_data.prompts("lm-eval", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no config/dataset2prompt.json.*--prompts lm-eval or kvsketch"):
        longbench_data.prompts("longbench", str(tmp_path))
    write_config(tmp_path, {"qasper": "T: {context} Q: {input}"}, {"qasper": 7})
    found = longbench_data.prompts("auto", str(tmp_path))
    assert found.source == "longbench" and found.lengths["qasper"] == 7 and found.lengths["trec"] == 64
    assert found.fill(task_of("qasper"), row) == "T: a {input} text Q: Who?"
    with pytest.raises(ValueError, match="prompts of longbench have none for trec; use --prompts kvsketch"):
        found.fill(task_of("trec"), row)


def write_config(folder: Path, templates: dict[str, str], lengths: dict[str, int]) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(templates))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(lengths))


def test_rows_come_from_a_folder_a_zip_file_or_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = longbench_data.rows(str(DATA), "qasper")
    assert [row.identity for row in expected] == [f"sample-qasper-{i}" for i in range(3)]
    assert expected[0].answers[0] == "North Carolina" and expected[0].length == len(expected[0].context.split())
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(DATA / "qasper.jsonl", "data/qasper.jsonl")
    assert longbench_data.rows(str(archive), "qasper") == expected
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qasper.jsonl").write_text((DATA / "qasper.jsonl").read_text() * 2)
    twice = [row.identity for row in longbench_data.rows(str(tmp_path), "qasper")]
    assert len(set(twice)) == 6 and twice[3] == "sample-qasper-0#2"

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names, **options: str(archive))
    assert longbench_data.rows("hub", "qasper") == expected

    def offline(*names: str, **options: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    for data, name in (("hub", "qasper"), (str(archive), "trec"), (str(tmp_path), "trec"), ("nowhere", "trec")):
        with pytest.raises(FileNotFoundError, match=r"download data.zip of the data set THUDM/LongBench"):
            longbench_data.rows(data, name)


@pytest.mark.parametrize("line", ["{", '{"context": "no answers"}', '"text"'])
def test_a_row_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "trec.jsonl").write_text((DATA / "trec.jsonl").read_text() + line)
    with pytest.raises(ValueError, match=r"trec.jsonl, line 3 is no LongBench row.*context, input, answers"):
        longbench_data.rows(str(tmp_path), "trec")


@pytest.mark.parametrize("truncation", longbench_encoding.TRUNCATIONS)
@pytest.mark.parametrize("chat", [True, False])
def test_the_middle_is_cut_out(tokenizer: Any, truncation: str, chat: bool) -> None:
    text = "".join(chr(97 + index % 26) for index in range(500))
    found = encode(tokenizer, text, chat=chat, limit=21, truncation=truncation)
    expected = text[:10] + text[-10:]
    assert tokenizer.decode(found.ids[0]) == (f"<user>{expected}<answer>" if chat else expected)
    assert found.truncated and found.tokens == found.ids.shape[1] and found.question is None
    whole = encode(tokenizer, text, chat=chat, limit=500, truncation=truncation)
    assert not whole.truncated and text in tokenizer.decode(whole.ids[0])


@pytest.mark.parametrize("truncation", longbench_encoding.TRUNCATIONS)
@pytest.mark.parametrize("chat", [True, False])
def test_the_question_is_the_end_of_the_prompt(tokenizer: Any, truncation: str, chat: bool) -> None:
    text = "A message. Question: who? " * 20 + "Question: Which state?\nAnswer:"
    question = question_of(text, "Question:")
    assert question == "Question: Which state?\nAnswer:"
    whole = encode(tokenizer, text, chat=chat, limit=200, truncation=truncation)
    split = encode(tokenizer, text, chat=chat, limit=200, truncation=truncation, question=question)
    assert split.question is not None
    assert torch.equal(torch.cat([split.ids, split.question], 1), whole.ids)
    assert tokenizer.decode(split.question[0]) == question + ("<answer>" if chat else "")


def test_a_question_has_at_most_100_characters() -> None:
    text = "Question: " + "x" * 300
    assert question_of(text, "Question:") == "x" * 100
    assert question_of(text, "") == question_of(text, "Now,") == "x" * 100
    assert question_of("short", "Now,") == "short"


def test_a_prompt_leaves_room_for_the_answer(tiny: Path, tokenizer: Any) -> None:
    model = models.load(tiny)[0]
    plain = longbench_encoding.prompt_limit(model, tokenizer, False, 96)
    assert plain == 4000 - longbench_encoding.SPARE_TOKENS
    assert longbench_encoding.prompt_limit(model, tokenizer, True, 96) == plain - len("<user><answer>")
    with pytest.raises(ValueError, match="context of 4096 tokens has no room for 5000"):
        longbench_encoding.prompt_limit(model, tokenizer, False, 5000)


LINE = ["--tasks", "trec,qasper", "--methods", "full,streamingllm", "--budgets", "1/4", "--max-prompt", "300"]


def command(tiny: Path, out: Path, *more: str, data: Path = DATA) -> list[str]:
    return ["--model", str(tiny), "--data", str(data), "--out", str(out), "--device", "cpu", *LINE, *more]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    folder = tmp_path / "short"
    folder.mkdir()
    for name in ("trec", "qasper"):
        shutil.copy(DATA / f"{name}.jsonl", folder)
    templates = {name: longbench_tasks.TASKS[name].template for name in ("trec", "qasper")}
    write_config(folder, templates, {"trec": 6, "qasper": 6})
    return folder


def test_a_run_resumes_and_records_failures(
    tiny: Path, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[Any] = []
    load = models.load
    monkeypatch.setattr(models, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    score = longbench.score

    def broken(metric: str, *arguments: Any) -> float:
        if metric == "classification":
            raise RuntimeError("broken\nscorer")
        return score(metric, *arguments)

    out = tmp_path / "out"
    monkeypatch.setattr(longbench, "score", broken)
    assert longbench.main(command(tiny, out, "--limit", "1", data=short)) == 1
    found = [record["data"] for record in records.read(out / "longbench.jsonl")]
    assert [(d["task"], d["method"], "failed" in d) for d in found] == [
        ("trec", "full", True),
        ("trec", "streamingllm", True),
        ("qasper", "full", False),
        ("qasper", "streamingllm", False),
    ]
    assert found[0]["failed"] == "RuntimeError: broken scorer" and found[0]["prompts"] == "longbench"
    assert "2 of them failed" in capsys.readouterr().out
    monkeypatch.setattr(longbench, "score", score)
    assert longbench.main(command(tiny, out, "--limit", "1", data=short)) == 1 and len(loads) == 1
    assert longbench.main(command(tiny, out, data=short)) == 1
    assert longbench.main(command(tiny, out, "--retry-failed", data=short)) == 0 and len(loads) == 3
    data = [record["data"] for record in records.read(out / "longbench.jsonl")]
    keys = [(d["sample"], d["method"]) for d in data if "failed" not in d]
    assert len(keys) == len(set(keys)) == 10 and len(data) == 12
    cut = next(d for d in data if d["task"] == "qasper" and d["method"] == "streamingllm")
    assert cut["truncated"] and cut["prompt_tokens"] == 300 and cut["tokens_stored"] == 75
    assert cut["device_bytes"] < cut["full_bytes"]


def test_the_full_cache_gives_the_models_own_answer(tiny: Path, tmp_path: Path, short: Path) -> None:
    assert longbench.main(command(tiny, tmp_path, "--limit", "1", "--methods", "full", data=short)) == 0
    model, tokenizer = models.load(tiny, device="cpu")
    for record in records.read(tmp_path / "longbench.jsonl"):
        data = record["data"]
        row = longbench_data.rows(str(short), data["task"])[0]
        prompt = longbench_data.prompts("longbench", str(short)).fill(task_of(data["task"]), row)
        ids = encode(tokenizer, prompt, chat=False, limit=300).ids
        own = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert data["answer"] == tokenizer.decode(own, skip_special_tokens=True)


def test_the_question_comes_after_compression(
    tiny: Path, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    prefill = longbench.shared_prefill
    monkeypatch.setattr(longbench, "shared_prefill", lambda m, ids: read.append(ids.shape[1]) or prefill(m, ids))
    line = command(tiny, tmp_path, "--tasks", "qasper", "--limit", "1", data=short)
    assert longbench.main(line) == 0
    assert longbench.main([*line, "--question", "unseen"]) == 0
    first, second = [r["data"] for r in records.read(tmp_path / "longbench.jsonl") if r["data"]["method"] == "full"]
    question = "Question: Which state has recently joined the Union?\nAnswer:"
    assert read == [300, 300 - len(question)] and second["prompt_tokens"] == 300
    assert second["question"] == "unseen" and first["answer"] == second["answer"], "exact either way"


def test_budgets_equal_in_bytes(tiny: Path, tmp_path: Path, short: Path) -> None:
    line = command(tiny, tmp_path, "--tasks", "qasper", "--limit", "1", "--budgets", "1/2", data=short)
    assert longbench.main([*line, "--budgets-in", "bytes"]) == 0
    data = next(r["data"] for r in records.read(tmp_path / "longbench.jsonl") if r["data"]["budget"])
    assert 0.4 < data["device_bytes"] / data["full_bytes"] <= 0.5 and data["budget_tokens"] == data["tokens_stored"]


def test_options_that_cannot_be(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--max-prompt 1 is not possible"):
        longbench.main(command(tiny, tmp_path, "--max-prompt", "1"))
    with pytest.raises(ValueError, match="unknown LongBench task 'squad'"):
        longbench.main(command(tiny, tmp_path, "--plain-tasks", "squad"))


@pytest.mark.real_model
def test_a_real_model_answers(tmp_path: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--data", str(short), "--tasks", "qasper", "--limit", "1", "--methods", "full,snapkv", "--budgets", "1/2"]
    assert longbench.main([*line, "--out", str(tmp_path), "--device", "cpu", "--columns", "tasks"]) == 0
    data = [record["data"] for record in records.read(tmp_path / "longbench.jsonl")]
    assert len(data) == 2 and not any("failed" in each for each in data)
    assert max(each["score"] for each in data if each["method"] == "full") > 0
    assert all(each["tokens_stored"] <= each["prompt_tokens"] // 2 for each in data if each["method"] == "snapkv")
    assert "qasper" in capsys.readouterr().out
