"""The wire format of chat completions: a request as a body, a completion as a raw reply."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from samrag.calls import JUDGEMENTS, CallKind, Failure, FailureReason
from samrag.engines.base import RawReply, Request
from samrag.engines.costs import Tokens
from samrag.images import read_image
from samrag.replies import reply_schema

StructuredOutput = Literal["json_schema", "vllm", "none"]
_TOP_LOGPROBS = 20  # the most that OpenAI and vLLM (by default) give
_CACHED_BYTES = 64 * 2**20


def data_uri(path: Path, max_px: int) -> str:
    """An image as a data URI, its longest side at most `max_px`; photographs (JPEG) as JPEG, all others as PNG."""
    with Image.open(path) as original:
        media = "jpeg" if original.format == "JPEG" else "png"
    image = read_image(path)
    image.thumbnail((max_px, max_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, media, **({"quality": 92} if media == "jpeg" else {}))
    return f"data:image/{media};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Images:
    """Images as data URIs; the latest are kept, up to a number of bytes, because several calls show the same one."""

    def __init__(self, max_px: int) -> None:
        self.max_px = max_px
        self._kept: OrderedDict[tuple[Path, int, int], str] = OrderedDict()
        self._size = 0

    async def uri(self, path: Path) -> str:
        """The data URI of a file; raises what `samrag.images.IMAGE_ERRORS` lists."""
        status = path.stat()
        version = (path, status.st_mtime_ns, status.st_size)
        if version in self._kept:
            self._kept.move_to_end(version)
            return self._kept[version]
        uri = await asyncio.to_thread(data_uri, path, self.max_px)
        if version not in self._kept:  # another call may have been quicker
            self._kept[version] = uri
            self._size += len(uri)
        while self._size > _CACHED_BYTES:
            self._size -= len(self._kept.popitem(last=False)[1])
        return uri


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a request is put to a server."""

    model: str
    structured_output: StructuredOutput = "json_schema"
    """How the server is asked to enforce the reply's JSON schema: OpenAI's `response_format`, vLLM's extra field, or
    not at all (the reply is read as strictly in any case)."""
    max_tokens_name: str = "max_tokens"
    """Name of the length limit; newer OpenAI models want `max_completion_tokens`."""

    def body(self, request: Request, image_url: str | None) -> dict[str, Any]:
        """The JSON body. Static text first, then the image, then what varies, so that servers can share a prefix."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": request.prompt.instruction}]
        if image_url:
            parts.append({"type": "image_url", "image_url": {"url": image_url}})
        parts.append({"type": "text", "text": request.prompt.body})
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if request.repair is not None:
            messages.append({"role": "assistant", "content": request.repair.reply})
            messages.append({"role": "user", "content": request.repair.message})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed + request.sample_index,
            self.max_tokens_name: request.sampling.max_tokens,
        }
        schema = reply_schema(request.kind)
        if request.direct:
            response = schema["properties"]["Response"]
            schema = {**schema, "properties": {"Response": response}, "required": ["Response"]}
            body |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        if self.structured_output == "json_schema":
            named = {"name": str(request.kind), "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif self.structured_output == "vllm":
            body["structured_outputs"] = {"json": schema}
        return body


def billed(completion: Mapping[str, Any]) -> Tokens:
    """The usage of a completion; zeros where the server counts nothing."""
    usage = completion.get("usage")
    if not isinstance(usage, Mapping):
        return Tokens()
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, Mapping) else {}
    return Tokens(
        usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, details.get("cached_tokens") or 0
    )


def with_probability(reply: RawReply, kind: CallKind, completion: Mapping[str, Any]) -> RawReply | Failure:
    """A direct verdict with its probability among the verdicts of its kind, from the completion's `logprobs`.

    The verdicts part at the first token that reaches into the verdict's word. Each alternative there counts for the
    verdict that it begins; one that begins several, or none, counts for nothing.
    """
    start = re.search(r'"Response"\s*:\s*"', reply.text)
    verdict = next((v for v in JUDGEMENTS[kind] if start and reply.text.startswith(f'{v}"', start.end())), None)
    if start is None or verdict is None:
        return reply  # not a verdict: the strict parser says what is wrong
    head, before = reply.text[: start.end()], ""
    try:
        for item in completion["choices"][0]["logprobs"]["content"]:
            if len(before + item["token"]) > len(head):
                break
            before += item["token"]
        else:
            raise ValueError("the tokens end before the verdict")
        mass = dict.fromkeys(JUDGEMENTS[kind], 0.0)
        for other in item["top_logprobs"]:
            text = before + other["token"]
            begun = [v for v in mass if f'{head}{v}"'.startswith(text) or text.startswith(f'{head}{v}"')]
            if len(begun) == 1:
                mass[begun[0]] += math.exp(other["logprob"])
        return replace(reply, probability=mass[verdict] / sum(mass.values()))
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return Failure(
            FailureReason.INVALID_REPLY, "the server returned no usable logprobs; ask it for reasoned verdicts"
        )


def read_completion(completion: Any) -> RawReply | Failure | None:
    """A completion's JSON as a raw reply; None when it is not one."""
    choices = completion.get("choices") if isinstance(completion, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    if not isinstance(first, Mapping) or not isinstance(message, Mapping):
        return None
    tokens = billed(completion)
    counts = (tokens.input, tokens.output)
    if message.get("refusal"):
        return RawReply(str(message["refusal"]), "content_filter", *counts)
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        return None
    finish_reason = first.get("finish_reason")
    if finish_reason not in ("length", "content_filter"):
        finish_reason = "stop"
        if not content:
            return Failure(FailureReason.INVALID_REPLY, "empty reply")
    return RawReply(content or "", finish_reason, *counts)
