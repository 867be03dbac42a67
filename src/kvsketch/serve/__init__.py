"""Serving a model with compressed caches.

requests.py     what an engine is asked and how it answers: Request, Ticket, EngineState
engine.py       the engine: rows that join and leave over one decode step, or take steps by themselves
schedule.py     who waits, whose prompt is read and who runs
caches.py       the caches that requests read their prompts into
own_steps.py    decode steps of a request that shares no tables with others
tokens.py       tokens on their way to the host, and what grammars make of them
text.py         messages to token ids, and answers that grow token by token
spans.py        which tokens of a chat are what: tool results, thinking and so on
chats.py        caches of chats between two turns
documents.py    texts that are read once and kept on disk
held.py         what a cache holds of a text, for people
files.py        the text of a file
pdf.py          the text of a PDF, run in a process of its own
schema.py       what clients may send
service.py      what a request means, and which engine answers it
app.py          the routes
connections.py  how long the server waits for clients, and how many it lets in
metrics.py      what Prometheus reads
server.py       uvicorn around it
page/           the page at /
"""
