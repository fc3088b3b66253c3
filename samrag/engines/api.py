"""A model behind an OpenAI-compatible server: OpenAI itself, vLLM, SGLang, llama.cpp, or the mini world's teacher.

The client's own retries are off; retrying is done here, by class of error: what may pass is tried again, what cannot
is a `Failure` of that request, and what would spoil every request (key, model, address, credit, budget) stops the run.
Whatever was sent by then is waited for, since it is paid for. The API key is read from the environment when the client
is made, and is kept nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.calls import Failure, FailureReason
from samrag.engines.base import RawReply, Request
from samrag.engines.chat import ChatFormat, Images, StructuredOutput, billed, read_completion, with_probability
from samrag.engines.costs import Estimate, Ledger, Tokens, estimate, guessed_tokens, most_tokens
from samrag.engines.limits import Clock, Limiter, Turn, retry_after_s
from samrag.engines.meter import Meter
from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS

if TYPE_CHECKING:
    import openai

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_RETRIED_STATUS = (408, 409, 429)
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_MOST_LIMITED = 50  # 429s that one request sits out; they are not attempts
_REFUSALS_THAT_STOP = 20
_GIVEN_UP_THAT_STOP = 3  # requests given up after all attempts, while nothing was ever answered
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """An attempt that came to nothing, and may be made again."""

    name: str
    """Its class, for the counts."""
    detail: str
    headers: Mapping[str, str]
    unreachable: bool = False
    """No connection came about (refused, unknown host), as against a slow or broken one."""


class ApiBackend:
    """Asks a chat-completions server, within its limits and the budget."""

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
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout_s: float = 60.0,
        max_attempts: int = 5,
        structured_output: StructuredOutput = "json_schema",
        max_image_px: int = 1024,
        max_tokens_name: str = "max_tokens",
        repairs: bool = True,
        ledger: Ledger | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Keep the settings; nothing is contacted yet.

        Args:
            model: Model name as the server knows it.
            base_url: Address of the API, usually ending in `/v1`.
            api_key_env: Environment variable that holds the key; servers of one's own mostly need none.
            image_root: Folder the image paths of requests are relative to.
            concurrency: Requests under way at once, at most; fewer when the server is overloaded.
            requests_per_minute: Requests sent a minute, at most; a lower limit in the server's headers wins.
            tokens_per_minute: Tokens a minute, counted as prompt and `max_tokens`, likewise.
            timeout_s: Longest wait for one attempt.
            max_attempts: Attempts a request, the first included; a 429 does not count as one.
            structured_output: How the server is asked to enforce the reply's JSON schema.
            max_image_px: Longest side of an image that is sent.
            max_tokens_name: Name of the length limit in a request; newer OpenAI models want `max_completion_tokens`.
            repairs: Unusable replies may be asked about once more (see `samrag.engines.base.Engine`).
            ledger: Prices and budget.
            clock: For waiting; the machine's own by default.
        """
        counts = {"concurrency": concurrency, "max_attempts": max_attempts, "max_image_px": max_image_px}
        rates = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        for name, value in {**counts, **rates}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.image_root = Path(image_root)
        self.timeout_s = timeout_s
        self.max_attempts = max_attempts
        self.max_image_px = max_image_px
        self.repairs = repairs
        self.format = ChatFormat(model, structured_output, max_tokens_name)
        self.limiter = Limiter(concurrency, requests_per_minute, tokens_per_minute, clock)
        self.ledger = ledger or Ledger()
        self.meter = Meter(self.ledger)
        self._images = Images(max_image_px)
        self._client: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[RawReply | Failure]] = set()
        self._sent: set[asyncio.Task[Any]] = set()
        self._stopped_by: UserError | None = None
        self._closing = False
        self._reached = False
        self._num_answered = 0
        self._num_refused = 0
        self._num_given_up = 0

    def __repr__(self) -> str:
        return f"ApiBackend(model={self.model!r}, base_url={self.base_url!r})"

    @property
    def identity(self) -> str:
        """Model and what shapes its replies; not the address, the key or the limits."""
        return f"api:{self.model};schema={self.format.structured_output};image_px={self.max_image_px}"

    def estimate(self, requests: Sequence[Request], share: float = 1.0) -> Estimate:
        """What requests will take, none of them stored; `share` is the part of the price that is paid."""
        return estimate(requests, self.ledger.price, self.max_image_px, share)

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Answer requests, in order.

        Raises:
            UserError: bad key, unknown model, wrong address, no credit, budget spent: the run cannot go on.
        """
        self.connect()
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        self._tasks.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def close(self) -> None:
        """Drop what was not sent, wait for what was, and close the connections."""
        client, self._client = self._client, None
        if client is None or self._loop is not asyncio.get_running_loop():
            return
        self._closing = True
        for task in self._tasks - self._sent:
            task.cancel()
        if self._sent:
            log.info("waiting for %d calls under way; their replies are stored.", len(self._sent))
            await asyncio.wait(set(self._sent), timeout=self.timeout_s + 1)
        await client.close()

    def connect(self) -> openai.AsyncOpenAI:
        """The client, made in the running loop; one left from an ended loop is dropped.

        Raises:
            UserError: the server needs a key, and there is none.
        """
        import openai

        if not self.base_url.startswith(("http://", "https://")):
            raise UserError(f"the server's address {self.base_url!r} does not begin with http:// or https://.")
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            key = os.environ.get(self.api_key_env, "")
            if not key and "api.openai.com" in self.base_url:
                raise UserError(f"{self.base_url} needs a key; set the environment variable {self.api_key_env}.")
            self._client = openai.AsyncOpenAI(
                api_key=key or "none", base_url=self.base_url, timeout=self.timeout_s, max_retries=0
            )
            self._loop, self._closing, self._stopped_by = loop, False, None
            self._sent.clear()
        return self._client

    async def body(self, request: Request) -> dict[str, Any] | Failure:
        """The JSON body of a request, or why it cannot be sent."""
        image_url = None
        if request.prompt.image:
            try:
                image_url = await self._images.uri(within(self.image_root, request.prompt.image))
            except IMAGE_ERRORS as error:
                if isinstance(error, UserError):
                    raise
                return Failure(FailureReason.BAD_IMAGE, f"{request.prompt.image}: {error}"[:300])
        return self.format.body(request, image_url)

    async def _answer(self, request: Request) -> RawReply | Failure:
        async with self.limiter.lanes.lane():
            self._go_on()
            body = await self.body(request)
            if isinstance(body, Failure):
                return body
            try:
                return await self._attempt_often(request, body)
            except UserError as error:
                self._stopped_by = self._stopped_by or error
                raise

    def _go_on(self) -> None:
        """Stop here when the run has been stopped meanwhile."""
        if self._stopped_by is not None:
            raise self._stopped_by

    async def _attempt_often(self, request: Request, body: dict[str, Any]) -> RawReply | Failure:
        attempts = limited = 0
        while True:
            outcome = await self._attempt(request, body)
            if not isinstance(outcome, _Trouble):
                return outcome
            self.meter.troubles[outcome.name] += 1
            if outcome.unreachable and not self._reached:
                raise UserError(f"no server at {self.base_url}; start it, or check its address (teacher_url).")
            if outcome.name == "rate_limited":
                limited += 1
                if limited >= _MOST_LIMITED:
                    detail = f"turned away {limited} times: {outcome.detail}"
                    return Failure(FailureReason.RATE_LIMITED, detail)
            else:
                attempts += 1
            if attempts >= self.max_attempts or self._closing:
                break
            delay_s = retry_after_s(outcome.headers)
            await self.limiter.clock.sleep(_backoff_s(attempts + limited - 1) if delay_s is None else delay_s)
        if outcome.unreachable:
            raise UserError(
                f"the server at {self.base_url} is gone ({attempts} attempts); start it and run again:"
                " recorded replies are kept."
            )
        self._num_given_up += 1
        if not self._num_answered and self._num_given_up >= _GIVEN_UP_THAT_STOP:
            raise UserError(
                f"the server at {self.base_url} has answered none of its requests, each tried {attempts} times"
                f" ({outcome.detail}); check its address, and what it logs."
            )
        return Failure(FailureReason.SERVER, f"after {attempts} attempts: {outcome.detail}")

    async def _attempt(self, request: Request, body: dict[str, Any]) -> RawReply | Failure | _Trouble:
        """Send once, within limits and budget."""
        price, room = self.ledger.price, request.sampling.max_tokens
        reserved_usd = await self.ledger.reserve(most_tokens(request, price, self.max_image_px), room)
        bill: Tokens | None = Tokens()
        try:
            turn = await self.limiter.turn(guessed_tokens(request, price, self.max_image_px) + room)
            self._go_on()
            bill = None  # from here on it may be billed
            outcome, bill = await self._send(request, body, turn)
            return outcome
        except UserError:
            bill = Tokens()
            raise
        finally:
            self.ledger.settle(reserved_usd, bill)

    async def _send(
        self, request: Request, body: dict[str, Any], turn: Turn
    ) -> tuple[RawReply | Failure | _Trouble, Tokens | None]:
        """The outcome of one HTTP request, and what it was billed; None when nobody knows."""
        import openai

        client, task = self.connect(), asyncio.current_task()
        assert task is not None
        self._sent.add(task)
        try:
            # As extra_body, which goes out as it is: the client's walk through typed messages takes a third of a call.
            response = await client.chat.completions.with_raw_response.create(
                model=self.model, messages=[], extra_body=body
            )
            completion = json.loads(response.content)
            reply = read_completion(completion)
            self._reached = True
            if reply is None:
                return _Trouble("malformed", "the server's reply is not a chat completion", {}), None
            self._num_answered += 1
            self.limiter.succeeded(turn, str(request.kind), response.headers)
            if request.direct and isinstance(reply, RawReply) and reply.finish_reason == "stop":
                reply = with_probability(reply, request.kind, completion)
            return reply, billed(completion)
        except openai.APIStatusError as error:
            self._reached = True
            return self._judged(error, turn), Tokens()
        except openai.APITimeoutError:
            self.limiter.overloaded(turn, {}, park=False)
            return _Trouble("network", f"no reply within {self.timeout_s:g} s", {}), None
        except openai.APIConnectionError as error:
            gone = _unreachable(error)
            return _Trouble(
                "unreachable" if gone else "network", self.plain(error), {}, gone
            ), Tokens() if gone else None
        except (openai.APIResponseValidationError, ValueError) as error:  # no JSON, or bytes that are no text
            self._reached = True
            return _Trouble("malformed", self.plain(error), {}), None
        finally:
            self._sent.discard(task)

    def _judged(self, error: openai.APIStatusError, turn: Turn) -> Failure | _Trouble:
        """An error status by its class."""
        status, headers = error.status_code, error.response.headers
        if status == 429 and error.code not in _NO_CREDIT:
            self.limiter.overloaded(turn, headers, park=True)
            return _Trouble("rate_limited", self.plain(error), headers)
        if status >= 500 or (status in _RETRIED_STATUS and status != 429):
            if status == 503:
                self.limiter.overloaded(turn, headers, park=False)
            return _Trouble("server", self.plain(error), headers)
        return self._refused(error)

    def _refused(self, error: openai.APIStatusError) -> Failure:
        """A status that trying again does not change: stop the run, or give up this request."""
        status, said = error.status_code, self.plain(error)
        if status == 401:
            raise UserError(f"{self.base_url} refused the key (401); set {self.api_key_env} to a valid one.") from None
        if status == 403:
            raise UserError(f"the key may not use {self.model!r} at {self.base_url} (403): {said}") from None
        if status == 404:
            raise UserError(
                f"{self.base_url} knows no model {self.model!r}, or no chat completions (404); check teacher_model"
                f" and teacher_url, which mostly ends in /v1: {said}"
            ) from None
        if status in (402, 429):
            raise UserError(f"the account at {self.base_url} has no credit left; add some and run again.") from None
        if error.code == "content_filter":
            return Failure(FailureReason.CONTENT_FILTER, said)
        if error.code == "context_length_exceeded" or "context length" in said:
            return Failure(FailureReason.TOO_LONG, said)
        self._num_refused += 1
        if not self._num_answered and self._num_refused >= _REFUSALS_THAT_STOP:
            raise UserError(f"{self.base_url} refused the first {self._num_refused} requests; the last with: {said}")
        return Failure(FailureReason.BAD_REQUEST, said)

    def plain(self, problem: Exception | str) -> str:
        """A problem in few words, without the key should a server have repeated it."""
        text = str(problem) or type(problem).__name__
        key = os.environ.get(self.api_key_env)
        return (text.replace(key, "[key]") if key else text)[:300]


def _backoff_s(attempt: int) -> float:
    """Doubled with every attempt, and jittered so that requests that failed together do not return together."""
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


def _unreachable(error: Exception) -> bool:
    """Whether no connection came about (refused, unknown host), as against a slow or broken one."""
    import httpx2

    return isinstance(error.__cause__, httpx2.ConnectError)
