"""The tasks of LongBench: group, metric, length of the answer, and a prompt template of our own for each.

LongBench has 21 tasks in six groups; 13 of them have a twin, written with `_e` at its end (LongBench-E), whose
documents are spread evenly over lengths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EXTENDED = "_e"

GROUPS = {
    "single": "single-document questions",
    "multi": "multi-document questions",
    "summary": "summaries",
    "few-shot": "few-shot learning",
    "synthetic": "synthetic tasks",
    "code": "code completion",
}

_QUESTION = (
    "Read the text, then answer the question with as few words as possible.\n\n{context}\n\nQuestion: {input}\nAnswer:"
)
_QUESTION_ZH = "请阅读下文，然后简短地回答问题。\n\n{context}\n\n问题：{input}\n回答："
_SUMMARY = "Here is a text.\n\n{context}\n\nNow, write a summary of the text on one page.\n\nSummary:"
_EXAMPLES = "Follow the examples.\n\n{context}\n{input}"
_CODE = "Continue this code by one line.\n{context}{input}"


@dataclass(frozen=True)
class Task:
    """One task. `marker` is where the question begins in the published prompts, for questions fed as decode steps."""

    name: str
    group: str
    metric: str
    max_new_tokens: int
    template: str  # our own
    marker: str = ""
    extended: bool = False  # has a twin in LongBench-E
    chat: bool = True  # the prompt goes into the model's chat template
    first_line: bool = False  # only the first line of an answer counts


_TASKS = (
    Task("narrativeqa", "single", "qa_f1", 128, _QUESTION, marker="Do not provide"),
    Task("qasper", "single", "qa_f1", 128, _QUESTION, marker="Question:", extended=True),
    Task("multifieldqa_en", "single", "qa_f1", 64, _QUESTION, marker="Now,", extended=True),
    Task("multifieldqa_zh", "single", "qa_f1_zh", 64, _QUESTION_ZH, marker="问题："),
    Task("hotpotqa", "multi", "qa_f1", 32, _QUESTION, marker="Question:", extended=True),
    Task("2wikimqa", "multi", "qa_f1", 32, _QUESTION, marker="Question:", extended=True),
    Task("musique", "multi", "qa_f1", 32, _QUESTION, marker="Question:"),
    Task("dureader", "multi", "rouge_l_zh", 128, _QUESTION_ZH, marker="问题："),
    Task("gov_report", "summary", "rouge_l", 512, _SUMMARY, marker="Now,", extended=True),
    Task(
        "qmsum",
        "summary",
        "rouge_l",
        512,
        "Here is the transcript of a meeting.\n\n{context}\n\nQuestion: {input}\nAnswer in a few sentences:",
        marker="Now,",
    ),
    Task("multi_news", "summary", "rouge_l", 512, _SUMMARY, marker="Now,", extended=True),
    Task("vcsum", "summary", "rouge_l_zh", 512, "会议记录如下。\n\n{context}\n\n请写出会议总结："),
    Task("trec", "few-shot", "classification", 64, _EXAMPLES, extended=True, chat=False, first_line=True),
    Task(
        "triviaqa",
        "few-shot",
        "qa_f1",
        32,
        _EXAMPLES,
        marker="Answer the question",
        extended=True,
        chat=False,
        first_line=True,
    ),
    Task("samsum", "few-shot", "rouge_l", 128, _EXAMPLES, extended=True, chat=False, first_line=True),
    Task("lsht", "few-shot", "classification", 64, "请参照例子。\n\n{context}\n{input}", chat=False, first_line=True),
    Task(
        "passage_count",
        "synthetic",
        "count",
        32,
        "Some of these paragraphs occur more than once.\n\n{context}\n\n"
        "How many different paragraphs are there? Answer with the number only.\nNumber:",
        extended=True,
    ),
    Task(
        "passage_retrieval_en",
        "synthetic",
        "retrieval",
        32,
        "Here are numbered paragraphs.\n\n{context}\n\nThis is a summary of one of them.\n\n{input}\n\n"
        'Which one is it? Answer in the form "Paragraph 1".\nAnswer:',
        extended=True,
    ),
    Task(
        "passage_retrieval_zh",
        "synthetic",
        "retrieval",
        32,
        "以下段落均有编号。\n\n{context}\n\n以下是其中一个段落的摘要。\n\n{input}\n\n它出自哪一段？请按“段落1”的格式回答。\n回答：",
    ),
    Task("lcc", "code", "code_similarity", 64, _CODE, extended=True, chat=False),
    Task("repobench-p", "code", "code_similarity", 64, _CODE, extended=True, chat=False),
)
TASKS = {task.name: task for task in _TASKS}
NAMES = (*TASKS, *(task.name + EXTENDED for task in _TASKS if task.extended))
SHORTHANDS = ("all", "e", "english", *GROUPS)


def task_of(name: str) -> Task:
    """The task of a name, with or without `_e`."""
    if name not in NAMES:
        raise ValueError(f"unknown LongBench task {name!r}; choose from: {', '.join((*SHORTHANDS, *NAMES))}")
    return TASKS[name.removesuffix(EXTENDED)]


def task_names(text: str) -> list[str]:
    """Comma-separated names; `all` 21 tasks, `e` the 13 of LongBench-E, `english` all but Chinese ones, or a group."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        if part == "all":
            found += TASKS
        elif part == "e":
            found += [task.name + EXTENDED for task in _TASKS if task.extended]
        elif part == "english":
            found += [task.name for task in _TASKS if not is_chinese(task)]
        elif part in GROUPS:
            found += [task.name for task in _TASKS if task.group == part]
        else:
            task_of(part)
            found.append(part)
    if not found:
        raise ValueError(f"--tasks {text!r} names no task; choose from: {', '.join((*SHORTHANDS, *NAMES))}")
    return list(dict.fromkeys(found))


def is_chinese(task: Task) -> bool:
    return re.search(r"[\u4e00-\u9fff]", task.template) is not None
