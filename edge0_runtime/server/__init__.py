"""The HTTP server. Public: `app.create_app`, `address.bind`, `running.loading`, `running.serve`.

app.py                   the app, its errors, /v1/models, /health, /metrics
running.py, address.py   from a bound address to a server that runs, and to its end
connections.py           clients that do nothing any more
settings.py              what whoever runs it sets
requests.py, logs.py, metrics.py  ids of requests, log lines, numbers
openai_*.py, anthropic*.py a protocol each: its schema, to and from the server's own request; openai.py: what some share
tokens.py                /tokenize, /detokenize, /apply-template
conversation.py, tools.py what chat protocols ask for: turns, tools, the form of the answer
schema.py, errors.py     what requests have in common; what is said when one can't be served
exchange.py              the server's own request, and the events that answer it; nothing behind it knows a protocol
service.py, served.py    what every endpoint does; a model as the protocols see it
answer.py                one answer as JSON or as server-sent events
worker.py, generation.py the one thread that generates, and its bounded queue; one request in it
markup.py                thinking and tool calls in what a model writes
vocabulary.py, grammar.py a tokenizer's bytes; what an answer must look like
guard.py                 who may talk to the server: Host, Origin, API key, size and pace of the body
observe.py, page/        what the engine does, as JSON and as events; the page at /

Nothing is imported here. Text and sampling are the package's own (`text.py`, `sampling.py`): the command line uses them too.
"""
