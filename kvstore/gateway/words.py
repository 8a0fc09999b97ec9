"""From a request to the tokens that its engine will see."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Protocol

import aiohttp
import msgspec

from kvstore.errors import Unsupported
from kvstore.gateway.asked import CHAT, MOST_LOOKED_INTO, PROMPT, Asked
from kvstore.gateway.failing import told
from kvstore.gateway.reading import read

log = logging.getLogger(__name__)
_ASK_S: Final = 2.0
_NULL: Final = msgspec.Raw(b"null")
_MOST: Final = 64 << 20  # bytes of an engine's answer


class _Tokenised(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class Words(Protocol):
    """Tokenises prompts as the engines do."""

    async def tokens(self, asked: Asked, engine: str) -> Sequence[int] | None:
        """Token ids of the prompt; None where they cannot be told, and the request is routed by load alone.

        Args:
            asked: What came.
            engine: Base URL of an engine that serves it.
        """
        ...


class OwnTokenizer:
    """With the model's own tokenizer and chat template, on a thread.

    Args:
        name: A folder, or an id that is in the local cache of the Hugging Face hub.

    Raises:
        Unsupported: There is no such tokenizer here.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415  heavy, and only this way of telling needs it
        except ImportError:
            raise Unsupported("a tokenizer needs the package transformers", remedy="pip install 'kvtier[gateway]'") from None
        try:
            self._words = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError) as error:
            raise Unsupported(
                f"no tokenizer at {name!r}: {error}", remedy="set gateway.tokenizer to the model's folder, or leave it empty"
            ) from None
        self._arguments = frozenset(inspect.signature(self._words.apply_chat_template).parameters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-words")  # one: tokenizers are not safe on several

    async def tokens(self, asked: Asked, engine: str) -> Sequence[int] | None:  # noqa: ARG002  the seam's signature
        """See `Words`."""
        if asked.tokens is not None:
            return asked.tokens
        try:
            async with asyncio.timeout(_ASK_S):  # one long prompt is not to hold up those behind it
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._now, asked)
        except Exception as error:  # noqa: BLE001  templates are programs, and messages whatever a client wrote: the engine judges
            log.info("a prompt could not be tokenised: %s", told(error))
            return None

    def _now(self, asked: Asked) -> list[int] | None:
        said = asked.field
        special = said("add_special_tokens")
        if asked.path != CHAT:
            prompt, special = said("prompt"), True if special is None else special
            return list(self._words(prompt, add_special_tokens=special)["input_ids"]) if isinstance(prompt, str) else None
        given, generate = said("chat_template_kwargs") or {}, said("add_generation_prompt")
        template = {name: value for name, value in given.items() if name not in self._arguments}  # a client names no template
        template |= {name: value for name in ("documents", "continue_final_message") if (value := said(name)) is not None}
        text = self._words.apply_chat_template(
            [_as_rendered(message) for message in said("messages")],
            tokenize=False,
            tools=[_tool(each) for each in said("tools") or ()] or None,
            add_generation_prompt=True if generate is None else generate,
            **template,
        )
        return list(self._words(text, add_special_tokens=bool(special))["input_ids"])


def _as_rendered(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to a template: text in one piece, and a call's arguments as what they say."""
    found, content = dict(message), message.get("content")
    if isinstance(content, list):
        found["content"] = "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    if "tool_calls" in found and not found["tool_calls"]:
        del found["tool_calls"]
    elif "tool_calls" in found:
        found["tool_calls"] = [{**call, "function": _call(call["function"])} for call in found["tool_calls"]]
    return found


def _call(function: dict[str, Any]) -> dict[str, Any]:
    said = function.get("arguments")
    try:
        arguments = json.loads(said) if isinstance(said, str) else said
    except ValueError:
        arguments = None
    return {**function, "arguments": arguments if isinstance(arguments, dict) else {}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM hands it to a template: all fields that it knows, in its order."""
    said = tool["function"]
    function = {"name": said["name"], "description": said.get("description"), "parameters": said.get("parameters")}
    function |= {"strict": said["strict"]} if said.get("strict") is not None else {}
    return {"type": "function", "function": function}


class EngineTokenizer:
    """By asking the engine, whose answer is right by definition: `POST /tokenize`, as vLLM has it.

    Args:
        session: For requests.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def tokens(self, asked: Asked, engine: str) -> Sequence[int] | None:
        """See `Words`."""
        if asked.tokens is not None:
            return asked.tokens
        name, begins = ("messages", b"[") if asked.path == CHAT else ("prompt", b'"')
        prompt = memoryview(asked.fields.get(name, b""))
        if prompt.nbytes > MOST_LOOKED_INTO or prompt[:1] != begins:
            return None
        fields = {each: raw for each in (name, *PROMPT) if (raw := asked.fields.get(each)) and raw != _NULL}
        asking = self._session.post(
            f"{engine}/tokenize",
            data=msgspec.json.encode(fields),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=_ASK_S),
        )
        try:
            async with asking as answer:
                found = await read(answer, _MOST) if answer.status == 200 else None
                return msgspec.json.decode(found, type=_Tokenised).tokens if found else None
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            log.info("%s did not tokenise a prompt: %s", engine, told(error))
            return None
