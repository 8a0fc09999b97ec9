"""From a request to the tokens that its engine will see."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import aiohttp

from kvstore.errors import Unsupported
from kvstore.gateway.asked import CHAT, Asked

log = logging.getLogger(__name__)
_ASK_S: Final = 2.0
_CHAT_FIELDS: Final = ("tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-words")  # one: tokenizers are not safe on several

    async def tokens(self, asked: Asked, engine: str) -> Sequence[int] | None:  # noqa: ARG002  the seam's signature
        """See `Words`."""
        if asked.tokens is not None:
            return asked.tokens
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._now, asked)
        except Exception as error:  # noqa: BLE001  templates are programs, and messages whatever a client wrote: the engine judges
            log.info("a prompt could not be tokenised: %s", error)
            return None

    def _now(self, asked: Asked) -> list[int] | None:
        if asked.path != CHAT:
            prompt = asked.fields.get("prompt")
            return list(self._words(prompt)["input_ids"]) if isinstance(prompt, str) else None
        fields = asked.fields
        if not isinstance(fields.get("messages"), list):
            return None
        template = {"add_generation_prompt": True} | {name: fields[name] for name in _CHAT_FIELDS[:-1] if name in fields}
        template |= fields.get("chat_template_kwargs") or {}
        text = self._words.apply_chat_template(fields["messages"], tokenize=False, **template)
        return list(self._words(text, add_special_tokens=False)["input_ids"])


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
        fields: dict[str, Any] = {name: asked.fields[name] for name in ("model", *_CHAT_FIELDS) if name in asked.fields}
        name = "messages" if asked.path == CHAT else "prompt"
        if not isinstance(asked.fields.get(name), list if asked.path == CHAT else str):
            return None
        fields[name] = asked.fields[name]
        try:
            async with self._session.post(f"{engine}/tokenize", json=fields, timeout=aiohttp.ClientTimeout(total=_ASK_S)) as answer:
                found = await answer.json() if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.info("%s did not tokenise a prompt: %r", engine, error)
            return None
        tokens = found.get("tokens") if isinstance(found, dict) else None
        return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None
