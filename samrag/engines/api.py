"""A model behind an OpenAI-compatible server: OpenAI itself, vLLM, SGLang, llama.cpp, or the mini world's teacher.

The client's own retries are off; retrying is done here, by class of error: what may pass is tried again, what cannot
is a `Failure` of that request, and what would spoil every request (key, model, address) stops the run. The API key is
read from the environment when the client is made, and is kept nowhere else.

Left out: limits on requests and tokens a minute, prices, and the batch endpoint.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from samrag.calls import Failure, FailureReason
from samrag.engines.base import RawReply, Request
from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS, read_image
from samrag.replies import reply_schema

if TYPE_CHECKING:
    import openai

_FIRST_DELAY_S, _LONGEST_DELAY_S, _LONGEST_SERVER_DELAY_S = 0.5, 30.0, 300.0
_RETRIED_STATUS = (408, 409, 429)
_CACHED_IMAGES = 256
_REFUSALS_THAT_STOP = 20


def data_uri(path: Path, max_px: int) -> str:
    """An image as a data URI, its longest side at most `max_px`; photographs (JPEG) as JPEG, all others as PNG."""
    with Image.open(path) as original:
        media = "jpeg" if original.format == "JPEG" else "png"
    image = read_image(path)
    image.thumbnail((max_px, max_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, media, **({"quality": 92} if media == "jpeg" else {}))
    return f"data:image/{media};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class ApiBackend:
    """Asks a chat-completions server, with bounded concurrency and bounded retries."""

    answers_singly = True
    """Requests do not gain from coming in one batch; a store around this backend saves each reply on arrival."""

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str = "OPENAI_API_KEY",
        *,
        image_root: Path,
        concurrency: int = 32,
        timeout_s: float = 60.0,
        max_attempts: int = 5,
        structured_output: bool = True,
        max_image_px: int = 1024,
        max_tokens_name: str = "max_tokens",
    ) -> None:
        """Keep the settings; nothing is contacted yet.

        Args:
            model: Model name as the server knows it.
            base_url: Address of the API, usually ending in `/v1`.
            api_key_env: Environment variable that holds the key; servers of one's own mostly need none.
            image_root: Folder the image paths of requests are relative to.
            concurrency: Requests under way at once.
            timeout_s: Longest wait for one attempt.
            max_attempts: Attempts a request, the first included.
            structured_output: Ask the server to enforce the reply's JSON schema.
            max_image_px: Longest side of an image that is sent.
            max_tokens_name: Name of the length limit in a request; newer OpenAI models want `max_completion_tokens`.
        """
        counts = {"concurrency": concurrency, "max_attempts": max_attempts, "max_image_px": max_image_px}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.image_root = Path(image_root)
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.max_attempts = max_attempts
        self.structured_output = structured_output
        self.max_image_px = max_image_px
        self.max_tokens_name = max_tokens_name
        self._client: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(concurrency)
        self._images: OrderedDict[tuple[Path, int, int], str] = OrderedDict()
        self._not_before = 0.0  # monotonic time until which the server asked everyone to wait
        self._reached = False
        self._num_answered = 0
        self._num_refused = 0

    def __repr__(self) -> str:
        return f"ApiBackend(model={self.model!r}, base_url={self.base_url!r})"

    @property
    def identity(self) -> str:
        """Model and what shapes its replies; not the address, the key or the limits."""
        return f"api:{self.model};schema={self.structured_output};image_px={self.max_image_px}"

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Answer requests, in order.

        Raises:
            UserError: bad key, unknown model, wrong address, no credit: the run cannot go on.
        """
        self._connect()
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    def _connect(self) -> None:
        """Make the client in the running loop; one left from an ended loop is dropped."""
        import openai

        loop = asyncio.get_running_loop()
        if self._client is not None and self._loop is loop:
            return
        key = os.environ.get(self.api_key_env, "")
        if not key and "api.openai.com" in self.base_url:
            raise UserError(f"{self.base_url} needs a key; set the environment variable {self.api_key_env}.")
        self._client = openai.AsyncOpenAI(
            api_key=key or "none", base_url=self.base_url, timeout=self.timeout_s, max_retries=0
        )
        self._loop = loop
        self._places = asyncio.Semaphore(self.concurrency)

    async def _answer(self, request: Request) -> RawReply | Failure:
        async with self._places:
            image_url = None
            if request.prompt.image:
                path = within(self.image_root, request.prompt.image)
                try:
                    image_url = await self._image_url(path)
                except IMAGE_ERRORS as error:
                    return Failure(FailureReason.BAD_IMAGE, f"{request.prompt.image}: {error}"[:300])
            return await self._attempt_often(self._body(request, image_url))

    async def _image_url(self, path: Path) -> str:
        status = path.stat()
        version = (path, status.st_mtime_ns, status.st_size)
        if version not in self._images:
            uri = await asyncio.to_thread(data_uri, path, self.max_image_px)
            self._images[version] = uri
            while len(self._images) > _CACHED_IMAGES:
                self._images.popitem(last=False)
        else:
            self._images.move_to_end(version)
            uri = self._images[version]
        return uri

    def _body(self, request: Request, image_url: str | None) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"type": "text", "text": request.prompt.instruction}]
        if image_url:
            parts.append({"type": "image_url", "image_url": {"url": image_url}})
        parts.append({"type": "text", "text": request.prompt.body})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed + request.sample_index,
            self.max_tokens_name: request.sampling.max_tokens,
        }
        if self.structured_output:
            schema = {"name": str(request.kind), "schema": reply_schema(request.kind), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    async def _attempt_often(self, body: dict[str, Any]) -> RawReply | Failure:
        import openai

        assert self._client is not None
        problem: Exception | str = ""
        for attempt in range(self.max_attempts):
            await self._wait_for_turn()
            delay_s: float | None = None
            try:
                completion = await self._client.chat.completions.create(**body)
                self._reached = True
                reply = _read(completion)
                if reply is not None:
                    self._num_answered += 1
                    return reply
                problem = "the server's reply is not a chat completion"
            except openai.APIStatusError as error:
                self._reached = True
                status = error.status_code
                if status < 500 and (status not in _RETRIED_STATUS or error.code == "insufficient_quota"):
                    return self._refused(error)
                problem, delay_s = error, retry_after_s(error.response.headers)
                if status == 429 and delay_s:
                    self._not_before = max(self._not_before, time.monotonic() + delay_s)
            except (openai.APIConnectionError, openai.APIResponseValidationError, json.JSONDecodeError) as error:
                if _unreachable(error) and not self._reached:
                    raise UserError(f"no server at {self.base_url}; start it, or check base_url.") from error
                problem = error
            if attempt + 1 < self.max_attempts:
                await asyncio.sleep(delay_s if delay_s is not None else _backoff_s(attempt))
        if isinstance(problem, Exception) and _unreachable(problem):
            raise UserError(
                f"the server at {self.base_url} is gone ({self.max_attempts} attempts); start it and run again:"
                " recorded replies are kept."
            ) from problem
        return Failure(FailureReason.SERVER, f"after {self.max_attempts} attempts: {self._plain(problem)}")

    async def _wait_for_turn(self) -> None:
        while (wait_s := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    def _refused(self, error: openai.APIStatusError) -> Failure:
        """A status that trying again does not change: stop the run, or give up this request."""
        status, said = error.status_code, self._plain(error)
        if status == 401:
            raise UserError(f"{self.base_url} refused the key (401); set {self.api_key_env} to a valid one.") from None
        if status == 403:
            raise UserError(f"the key may not use {self.model!r} at {self.base_url} (403): {said}") from None
        if status == 404:
            raise UserError(
                f"{self.base_url} knows no model {self.model!r}, or no chat completions (404); check model and"
                f" base_url, which mostly ends in /v1: {said}"
            ) from None
        if status == 429:
            raise UserError(f"the account at {self.base_url} has no credit left; add some and run again.") from None
        if error.code == "content_filter":
            return Failure(FailureReason.CONTENT_FILTER, said)
        if error.code == "context_length_exceeded" or "context length" in said:
            return Failure(FailureReason.TOO_LONG, said)
        self._num_refused += 1
        if not self._num_answered and self._num_refused >= _REFUSALS_THAT_STOP:
            raise UserError(f"{self.base_url} refused the first {self._num_refused} requests; the last with: {said}")
        return Failure(FailureReason.BAD_REQUEST, said)

    def _plain(self, problem: Exception | str) -> str:
        """A problem in few words, without the key should a server have repeated it."""
        text = str(problem) or type(problem).__name__
        key = os.environ.get(self.api_key_env)
        return (text.replace(key, "[key]") if key else text)[:300]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds a server asks to wait, from `retry-after-ms` or `retry-after`; None when it does not say."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            delay_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0 <= delay_s < float("inf"):
            return min(delay_s, _LONGEST_SERVER_DELAY_S)
    return None


def _backoff_s(attempt: int) -> float:
    """Doubled with every attempt, and jittered so that requests that failed together do not return together."""
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def _unreachable(error: Exception) -> bool:
    """Whether no connection came about (refused, unknown host), as against a slow or broken one."""
    import httpx2

    return isinstance(error.__cause__, httpx2.ConnectError)


def _read(completion: Any) -> RawReply | Failure | None:
    """A completion as a raw reply; None when it is not one."""
    choices = getattr(completion, "choices", None)
    if not choices or choices[0].message is None:
        return None
    message = choices[0].message
    usage = completion.usage
    input_tokens, output_tokens = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
    finish_reason = choices[0].finish_reason
    if getattr(message, "refusal", None):
        return RawReply(message.refusal, "content_filter", input_tokens, output_tokens)
    if finish_reason not in ("length", "content_filter"):
        finish_reason = "stop"
        if not message.content:
            return Failure(FailureReason.INVALID_REPLY, "empty reply")
    return RawReply(message.content or "", finish_reason, input_tokens, output_tokens)
