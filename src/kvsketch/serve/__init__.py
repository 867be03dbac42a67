"""Serving a model with compressed caches.

requests.py     what an engine is asked and how it answers: Request, Ticket, EngineState
engine.py       the engine: rows that join and leave over one decode step, or take steps by themselves
pace.py         how much of a prompt is read between two tokens of the requests that run
schedule.py     who waits, whose prompt is read and who runs
caches.py       the caches that requests read their prompts into
unbatched.py    decode steps of a request that shares no tables with others
tokens.py       tokens on their way to the host, and what grammars make of them
grammar.py      answers that must follow a grammar
tools.py        tools that a model may call, and its calls
text.py         messages to token ids, and answers that grow token by token
spans.py        which tokens of a chat are what: tool results, thinking and so on
chats.py        caches of chats between two turns
documents.py    texts that are read once and kept on disk
doubtful.py     answers in doubt, asked again of the full cache
summary.py      what a cache holds of a text, for people
files.py        the text of a file
convert.py      the text of a PDF, Office file, book or HTML page, run in a process of its own
schema.py       what OpenAI's clients may send
anthropic_schema.py   what Anthropic's clients may send, as chats
forms.py        answers as OpenAI's endpoints write them
anthropic_forms.py    answers as Anthropic's endpoints write them
responses.py    conversations that go on by the id of the last response
truncation.py   conversations that are too long
service.py      what a request means, and which engine answers it
usage.py        what an answer took: tokens, and bytes beside those of the full cache
app.py          the routes
connections.py  how long the server waits for clients, and how many it lets in
metrics.py      what Prometheus reads
server.py       uvicorn around it
address.py      its address, taken before anything is loaded
page/           the page at /
"""
