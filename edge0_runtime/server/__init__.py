"""The OpenAI-compatible HTTP server. Public: `app.create_app`, `app.bind`, `app.serve`.

app.py     the endpoints
answer.py  one answer as JSON or as server-sent events
schema.py  what a request may hold, and errors in OpenAI's shape
guard.py   who may talk to the server: address, Host, Origin, API key, body size
worker.py  the one thread that generates, and its bounded queue

Nothing is imported here. Text and sampling are the package's own (`text.py`, `sampling.py`): the command line uses them too.
"""
