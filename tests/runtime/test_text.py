"""Tokens to text: whole characters, exact stop strings, under every way of cutting the text into tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.text import TextStream, chat_ids, decoder

REPLACEMENT = "\ufffd"


def chunked(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` cut at `cuts`: the tokens of a byte-level vocabulary that holds just these pieces."""
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts} - {0, len(data)}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def pieces_of(tokens: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    """What a client gets, piece by piece, and whether a stop string came; later tokens are not asked for."""
    stream = TextStream(lambda ids: b"".join(tokens[n] for n in ids).decode("utf-8", "replace"), stops)
    pieces = []
    for n in range(len(tokens)):
        pieces.append(stream.add(n))
        if stream.stopped_by is not None:
            break
    return [*pieces, stream.finish()], stream.stopped_by is not None


def cut_before_first_stop(text: str, stops: Sequence[str]) -> str:
    """The slow reference: read character by character until the text ends with a stop string."""
    for end in range(len(text) + 1):
        reached = [stop for stop in stops if text[:end].endswith(stop)]
        if reached:
            return text[: end - max(map(len, reached))]
    return text


TEXTS = st.text(alphabet="abfox n\n😀한é", max_size=24)
CUTS = st.lists(st.integers(0, 100), max_size=30)
STOPS = st.lists(st.text(alphabet="abfox n😀", min_size=1, max_size=5), max_size=4)


@given(TEXTS, CUTS)
@example("a😀b", [1, 2, 3, 4])
def test_characters_that_span_tokens_never_show_a_replacement(text, cuts):
    pieces, _ = pieces_of(chunked(text.encode(), cuts))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.binary(max_size=24), CUTS)
@example("😀😀".encode()[:-1], [1, 2, 3, 4, 5, 6])
@example(b"\xf0\x9f\x98\xf0\x9f\x98\x80", [1, 2, 3, 4, 5, 6])
@example(b"\xff" * 9 + "😀".encode(), list(range(13)))
def test_any_bytes_give_what_decoding_them_at_once_gives(data, cuts):
    pieces, _ = pieces_of(chunked(data, cuts))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_an_unfinished_character_at_the_end_comes_out_once():
    pieces, _ = pieces_of([b"a", b"\xf0", b"\x9f", b"\x98"])
    assert pieces == ["a", "", "", "", REPLACEMENT]


@given(TEXTS, CUTS, STOPS)
@example("the quick brown fox", [4, 10, 13], ["own fox"])
@example("xabcd", [], ["ab", "xabcd"])
@example("aab", [1, 2], ["ab"])
@example("foo", [1], ["fo", "o"])
def test_stop_strings_are_cut_exactly_under_every_chunking(text, cuts, stops):
    pieces, stopped = pieces_of(chunked(text.encode(), cuts), stops)
    expected = cut_before_first_stop(text, stops)
    assert "".join(pieces) == expected
    assert stopped == any(stop in text for stop in stops)


def test_a_text_that_only_begins_like_a_stop_string_is_released():
    pieces, stopped = pieces_of([b"br", b"own", b" fo", b"g"], ["own fox"])
    assert pieces == ["br", "", "", "own fog", ""]
    assert not stopped
    assert pieces_of([b"own fo"], ["own fox"]) == (["", "own fo"], False)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: a real tokenizer with one token per byte."""
    core = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    return tokenizer


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A decoder that strips the first space of a text, and has byte tokens."""
    pieces = [f"<0x{n:02X}>" for n in range(256)] + ["▁fox", "fox"]
    core = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def test_real_byte_level_tokenizer():
    tokenizer = byte_level_tokenizer()
    text = " two  foxes 😀, one 한"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    stream = TextStream(decoder(tokenizer))
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text  # with its leading space, and without the end token
    assert REPLACEMENT not in "".join(pieces)


def test_real_sentencepiece_tokenizer_keeps_inner_spaces_and_joins_byte_tokens():
    tokenizer = sentencepiece_tokenizer()
    ids = [256, 256, *"😀".encode(), tokenizer.eos_token_id, 256, 257]
    stream = TextStream(decoder(tokenizer))
    assert [stream.add(token) for token in ids] == ["fox", " fox", "", "", "", "😀", "", " fox", "fox"]


def test_chat_ids_says_what_is_wrong_with_template_or_messages():
    tokenizer = byte_level_tokenizer()
    turn = {"role": "user", "content": "abc"}
    with pytest.raises(Edge0Error, match="this model has none"):
        chat_ids(tokenizer, [turn])
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    assert len(chat_ids(tokenizer, [turn])) == 3
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Edge0Error, match=r"messages: .* refuses them: roles must alternate"):
        chat_ids(tokenizer, [turn, turn])
    tokenizer.chat_template = "{{ messages[1].content + 1 }}"
    with pytest.raises(Edge0Error, match=r"chat template: fails with TypeError: .*; correct the template"):
        chat_ids(tokenizer, [turn, turn])
