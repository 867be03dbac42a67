"""What two processes of a tensor parallel group do for test_tensor_parallel.py; the test runs the same by itself.

    python -m tests.helpers.tensor_parallel_worker FOLDER METHOD ...

FOLDER holds the models `divisible` and `single_head`; process r leaves its results in FOLDER/process_r.json and what it
says in process_r.txt. They find each other through FOLDER/group, not through a port that somebody else may take. They
are forked where that is possible, so that libraries are imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from kvsketch import CompressedCache
from tests.helpers.common import FED, generate, padded, with_budget
from tests.helpers.waiting import LONGEST_WAIT

PROCESSES, VOCABULARY = 2, 96
METHODS = [
    *(with_budget(name, 24) for name in FED),
    *(with_budget(name, 24) for name in ("snapkv:share=model", "h2o:share=layer")),
    "balancekv:budget=24:sinks=2:recent=4:form=stream",
    "balancekv:budget=40:sinks=2:recent=4:den_weight=same:block=8",
    "subgen:budget=40:sinks=2:recent=4:normalizer=clipped:policy=double",
    "clusterkv:budget=24:sinks=2:skip_layers=0:recluster=8:recluster_into=2",
    "clusterkv:budget=24:sinks=2:skip_layers=0:offload=host",
    "infinigen:budget=40:skip_layers=0:alpha=1.5",
]


def converse(model: Any, method: str) -> dict[str, Any]:
    """Some turns of a padded batch: tokens, what the cache counts, and which tokens each head of each layer holds."""
    cache = CompressedCache(model, method, seed=3)
    generator = torch.Generator().manual_seed(1)
    tokens, mask = padded(torch.randint(3, VOCABULARY, (2, 60), generator=generator), [0, 9])
    for turn in (0, 11, 2):
        tokens = torch.cat([tokens, torch.randint(3, VOCABULARY, (2, turn), generator=generator)], 1)
        mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
        tokens = generate(model, tokens, cache, attention_mask=mask, max_new_tokens=3).sequences
    tables = [layer.table for layer in cache.slot_layers]
    return {
        "tokens": tokens.tolist(),
        "kept": [
            [sorted(n for n in head if n >= 0) for row in t.index_slots().tolist() for head in row] for t in tables
        ],
        "heads": [list(range(table.context.first_head, table.context.first_head + table.shape[1])) for table in tables],
        "tokens_stored": cache.tokens_stored,
        "bytes": cache.device_bytes + cache.host_bytes,
    }


def refusals(split: Any, folder: Path) -> dict[str, str]:
    """The messages for models, or what stands for them, whose heads cannot be told apart."""
    single_head = load(folder / "single_head", tp_size=2)
    models = {"one KV head": single_head, "config": split.config}
    messages = {}
    for name, model in models.items():
        try:
            CompressedCache(model, "streamingllm")
        except ValueError as error:
            messages[name] = str(error)
    return messages


def load(folder: Path, **sizes: int) -> Any:
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    # Random weights: every token is an ordinary one.
    model.generation_config.eos_token_id = None
    return model


def work(rank: int, folder: Path, methods: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    said = os.open(folder / f"process_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    dist.init_process_group("gloo", f"file://{folder.resolve()}/group", rank=rank, world_size=PROCESSES)
    model = load(folder / "divisible", tp_size=2)
    results: dict[str, Any] = {method: converse(model, method) for method in methods}
    results["refusals"] = refusals(model, folder)
    (folder / f"process_{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(folder: Path, *methods: str) -> int:
    assert LlamaForCausalLM is not None  # imported here, so that no process has to
    start = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    both = [start.Process(target=work, args=(rank, folder, list(methods)), daemon=True) for rank in range(PROCESSES)]
    for process in both:
        process.start()
    # Without the other one a process may wait for long.
    while alive := [process for process in both if process.is_alive()]:
        ended = connection.wait([process.sentinel for process in alive], 10 * LONGEST_WAIT)
        if not ended or any(process.exitcode for process in both):
            for process in alive:
                process.kill()
                process.join()
    return int(any(process.exitcode for process in both))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
