"""Serves a model as `kvsketch serve` does and asks for JSON that follows a schema: for `make release`.

python scripts/served_schema.py smollm2-135m
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from kvsketch import models
from kvsketch.serve.server import Server, start_service

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
QUESTION = [{"role": "user", "content": "What colour has grass?"}]


def asked(address: str, path: str, **fields: Any) -> Any:
    body = json.dumps({"messages": QUESTION, "max_tokens": 40, **fields}).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def main(name: str) -> None:
    model, tokenizer = models.load(name)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(start_service(model, tokenizer, name, "rehearse", folder=Path(folder), rows=1))
        thread = threading.Thread(target=server._server.run, kwargs={"sockets": [server._socket]}, daemon=True)
        thread.start()
        while not server._server.started and thread.is_alive():
            thread.join(0.01)
        form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
        chat = asked(server.address, "/v1/chat/completions", model=name, response_format=form)
        output = {"format": {"type": "json_schema", "schema": COLOUR}}
        message = asked(server.address, "/v1/messages", model=name, output_config=output)
        for text in (chat["choices"][0]["message"]["content"], message["content"][0]["text"]):
            assert json.loads(text)["colour"] in ("red", "green"), text
        print("served:", chat["choices"][0]["message"]["content"], chat["usage"]["kvsketch"])
        server._server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
