"""Prompts are made beside the event loop: a template that is slow holds up nobody, and one that never ends is stopped."""

from __future__ import annotations

import threading

import pytest

from edge0_runtime.contract import rendering
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine
from edge0_runtime.text import chat_ids
from tests.runtime.marked_up import with_template
from tests.runtime.scripted_server import HELLO, URL, WAIT_S, ByteTokenizer, FakeEngine, ask, client_of, live
from tests.runtime.test_server_faults import client_that_waits

ENDLESS = """{% if messages[0].content == 'slow' %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}{{ messages[0].content }}"""


class SlowTokenizer(ByteTokenizer):
    """Its template waits for `go`."""

    def __init__(self) -> None:
        self.rendering, self.go = threading.Event(), threading.Event()

    def apply_chat_template(self, *args, **options):
        self.rendering.set()
        assert self.go.wait(WAIT_S)
        return super().apply_chat_template(*args, **options)


def test_while_a_template_renders_others_are_answered():
    import httpx

    tokenizer = SlowTokenizer()
    with live(FakeEngine(tokenizer=tokenizer)) as url, httpx.Client(base_url=url) as client:
        waiting = client_that_waits(url, stream=False)
        assert tokenizer.rendering.wait(WAIT_S)
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "", "n": 9}).status_code == 400
        tokenizer.go.set()
        assert ask(client).status_code == 200
        waiting.close()


def test_a_template_without_end_is_stopped(tiny_dir, tmp_path, monkeypatch):
    with Engine.load(with_template(tiny_dir, tmp_path / "model", ENDLESS)) as engine, client_of(engine) as client:
        with monkeypatch.context() as patch:
            patch.setattr(rendering, "RENDER_S", 0.2)
            response = client.post(URL, json={"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1})
            assert response.status_code == 400
            assert "longer than 0.2 s" in response.json()["error"]["message"]
            with pytest.raises(Edge0Error, match=r"longer than 0\.2 s"):
                chat_ids(engine.tokenizer, [HELLO[0] | {"content": "slow"}])
        assert ask(client, max_tokens=1).status_code == 200
