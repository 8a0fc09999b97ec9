"""The gateway's own tokenizer: what a template is given, and what a client cannot make of it."""

import asyncio
import threading

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvstore.errors import Unsupported
from kvstore.gateway import words
from kvstore.gateway.asked import CHAT, COMPLETIONS, asked
from kvstore.gateway.words import OwnTokenizer

TEMPLATE = r"""{% for tool in tools or [] %}{{ (tool | tojson) + "\n" }}{% endfor %}
{% for message in messages %}{{ message.role + ":" + message.content + ("!\n" if "tool_calls" in message else "\n") }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{{ "\n" }}{% endfor %}
{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(["^", *(set(alphabet) - {"^"})])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="^", chat_template=TEMPLATE)
    made.save_pretrained(folder := tmp_path_factory.mktemp("words"))
    return str(folder)


@pytest.fixture
def said(folder):
    own, back = OwnTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    async def text(path=CHAT, **body):
        request = asked(path, msgspec.json.encode(body), CIMultiDictProxy(CIMultiDict()))
        tokens = await own.tokens(request, "")
        return None if tokens is None else back.decode(tokens)

    return text


USER = {"role": "user", "content": "hi"}


async def test_a_conversation_is_rendered(said):
    assert await said(messages=[USER]) == "user:hi\n>"
    assert await said(messages=[USER], add_generation_prompt=False) == "user:hi\n"
    assert await said(messages=[USER], add_special_tokens=True) == "^user:hi\n>"
    assert await said(messages=[USER], chat_template_kwargs={"mood": "glad"}) == "user:hi\nglad>"


async def test_a_text_has_its_special_tokens(said):
    assert await said(COMPLETIONS, prompt="hi") == "^hi"
    assert await said(COMPLETIONS, prompt="hi", add_special_tokens=False) == "hi"


async def test_text_in_parts_is_one_text(said):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert await said(messages=[{"role": "user", "content": parts}]) == "user:one\ntwo\n>"


async def test_tools_have_all_fields_in_the_engines_order(said):
    tool = {"function": {"parameters": {}, "name": "f", "mine": 1}, "type": "function"}
    rendered = '{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}\nuser:hi\n>'
    assert await said(messages=[USER], tools=[tool]) == rendered


@pytest.mark.parametrize(
    ("arguments", "city"), [('{"city": "X"}', "X"), ({"city": "X"}, "X"), ("{", ""), ("[1]", ""), (None, ""), ("", "")]
)
async def test_a_calls_arguments_are_what_they_say(said, arguments, city):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert await said(messages=[{"role": "assistant", "content": "c", "tool_calls": [call]}]) == f"assistant:c!\n{city}\n>"


async def test_no_calls_are_none(said):
    assert await said(messages=[{"role": "assistant", "content": "c", "tool_calls": []}]) == "assistant:c\n>"


@pytest.mark.parametrize("named", ["chat_template", "tokenize", "tools", "conversation", "max_length", "return_dict"])
async def test_a_client_changes_no_argument_but_the_templates(said, named):
    assert await said(messages=[USER], chat_template_kwargs={named: "{{ evil }}"}, chat_template="{{ evil }}") == "user:hi\n>"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "no"},
        {"messages": [1]},
        {},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [USER], "tools": [1]},
        {"messages": [USER], "chat_template_kwargs": [1]},
    ],
)
async def test_what_cannot_be_rendered_has_no_tokens(said, body):
    assert await said(**body) is None


async def test_a_prompt_that_takes_long_is_not_waited_for(folder, monkeypatch):
    own, release = OwnTokenizer(folder), threading.Event()
    monkeypatch.setattr(words, "_ASK_S", 0.05)
    monkeypatch.setattr(own, "_now", lambda _: release.wait(30))
    request = asked(CHAT, b"{}", CIMultiDictProxy(CIMultiDict()))
    found = await asyncio.gather(*(own.tokens(request, "") for _ in range(5)))
    release.set()
    assert found == [None] * 5


def test_no_tokenizer_is_said(tmp_path):
    with pytest.raises(Unsupported, match="no tokenizer at"):
        OwnTokenizer(str(tmp_path))
