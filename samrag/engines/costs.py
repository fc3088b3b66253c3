"""Money: prices per million tokens, what requests may cost, and a ledger that stops before the budget is passed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from samrag.config import STRICT
from samrag.errors import UserError

if TYPE_CHECKING:
    from samrag.engines.base import Request

BATCH_SHARE = 0.5
"""What a request costs in a batch, as a share of its price."""
_MILLION = 1e6
_CHARACTERS_A_TOKEN = 4.0
_FRAME_TOKENS = 32  # roles, schema names and the like around a message
_IMAGE_PX = 1024  # the image size that a price's `image_tokens` is for


@checked_dataclass(config=STRICT, frozen=True)
class Price:
    """US dollars per million tokens of one model."""

    input: float
    output: float
    cached_input: float | None = None
    """Input that the server had in its prompt cache; none is the price of input."""
    image_tokens: float = 1000.0
    """Tokens that one image of 1024 x 1024 pixels counts as."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input", "image_tokens"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def cost_usd(self, tokens: Tokens) -> float:
        """What requests with these tokens cost."""
        cached = self.input if self.cached_input is None else self.cached_input
        fresh = tokens.input - tokens.cached
        return (fresh * self.input + tokens.cached * cached + tokens.output * self.output) / _MILLION


def _read_prices(text: str, source: str) -> dict[str, Price]:
    try:
        value: Any = yaml.safe_load(text)
        return TypeAdapter(dict[str, Price]).validate_python(value or {})
    except yaml.YAMLError as error:
        raise UserError(f"price_file: {source} is not valid YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"price_file: {source}, {where or 'top level'}: {first['msg']}.") from error


def price_of(model: str, price_file: Path | None = None) -> Price | None:
    """A model's price, from the user's file or the packaged table; a dated name also finds its undated model.

    Raises:
        UserError: the file is missing or is not a table of prices.
    """
    packaged = (resources.files("samrag") / "engines" / "prices.yaml").read_text(encoding="utf-8")
    prices = _read_prices(packaged, "prices.yaml")
    if price_file is not None:
        try:
            text = price_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"price_file: {price_file} cannot be read ({error}); check the path.") from error
        prices |= _read_prices(text, str(price_file))
    undated = re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model)
    return prices.get(model) or prices.get(undated)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a server counted."""

    input: int = 0
    output: int = 0
    cached: int = 0
    """Of the input, those that were in the server's prompt cache."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What requests will take. Input is a guess; output, and so the cost, is the most they may take."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    """None when the model has no known price."""

    def __str__(self) -> str:
        text = f"{self.calls:,} calls, about {self.input_tokens:,} tokens in and at most {self.output_tokens:,} out"
        return f"{text}: {'price unknown' if self.cost_usd is None else f'at most ${self.cost_usd:,.2f}'}"


def guessed_tokens(request: Request, price: Price | None, max_image_px: int) -> int:
    """About how many input tokens a request has."""
    return round(_characters(request) / _CHARACTERS_A_TOKEN + _image_tokens(request, price, max_image_px))


def most_tokens(request: Request, price: Price | None, max_image_px: int) -> int:
    """More input tokens than a request can have: a tokenizer never makes more tokens than there are bytes."""
    texts = _texts(request)
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return round(size + _FRAME_TOKENS * len(texts) + _image_tokens(request, price, max_image_px))


def _texts(request: Request) -> list[str]:
    again = [request.repair.reply, request.repair.message] if request.repair else []
    return [request.prompt.instruction, request.prompt.body, *again]


def _characters(request: Request) -> int:
    return sum(map(len, _texts(request)))


def _image_tokens(request: Request, price: Price | None, max_image_px: int) -> float:
    if not request.prompt.image:
        return 0.0
    per_image = price.image_tokens if price else Price(0.0, 0.0).image_tokens
    return float(per_image * max(1.0, (max_image_px / _IMAGE_PX) ** 2))


def estimate(
    requests: Iterable[Request], price: Price | None, max_image_px: int = _IMAGE_PX, share: float = 1.0
) -> Estimate:
    """What requests will take.

    Args:
        requests: the requests, stored ones left out.
        price: the model's price; None leaves the cost unknown.
        max_image_px: longest side of the images that are sent.
        share: share of the price that is paid (`BATCH_SHARE` in a batch).
    """
    calls = input_tokens = output_tokens = 0
    for request in requests:
        calls += 1
        input_tokens += guessed_tokens(request, price, max_image_px)
        output_tokens += request.sampling.max_tokens
    cost = price.cost_usd(Tokens(input_tokens, output_tokens)) * share if price else None
    return Estimate(calls, input_tokens, output_tokens, cost)


class Ledger:
    """What a run has spent, has in flight, and may spend.

    Every attempt reserves the most it may cost before it is sent. One that does not fit into what is left waits for
    the attempts in flight, whose true cost is mostly smaller; when none is in flight, the run stops.
    """

    def __init__(self, price: Price | None = None, budget_usd: float | None = None) -> None:
        """Keep the numbers.

        Raises:
            UserError: there is a budget, and no price to count with.
        """
        if budget_usd is not None and price is None:
            raise UserError("budget_usd: this teacher_model has no known price; give its prices in a price_file.")
        self.price = price
        self.budget_usd = budget_usd
        self.spent_usd = 0.0
        self.uncertain_usd = 0.0
        """Attempts that were cut off and may have been billed all the same, each at its reserve."""
        self.reserved_usd = 0.0
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self._excess = 1.0  # the largest bill against its reserve, should an estimate ever fall short
        self._waiting: list[asyncio.Future[None]] = []

    async def reserve(self, most_input_tokens: int, max_tokens: int) -> float:
        """Set aside the most an attempt may cost; returns the sum, for `settle`.

        Raises:
            UserError: the budget does not hold it.
        """
        if self.price is None:
            return 0.0
        sum_usd = self.price.cost_usd(Tokens(most_input_tokens, max_tokens))
        while self.budget_usd is not None:
            total = self.spent_usd + self.uncertain_usd + self.reserved_usd + sum_usd * self._excess
            if total <= self.budget_usd:
                break
            if self.reserved_usd == 0:
                raise UserError(
                    f"budget_usd of ${self.budget_usd:,.2f}: ${self.spent_usd + self.uncertain_usd:,.4f} is spent, and"
                    f" the next call may cost ${sum_usd * self._excess:,.4f}; every reply so far is stored, so raise"
                    " budget_usd and run the same command again to go on."
                )
            changed = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed
        self.reserved_usd += sum_usd * self._excess
        return sum_usd * self._excess

    def settle(self, reserved_usd: float, tokens: Tokens | None) -> None:
        """An attempt is over, and was billed so many tokens; None: it was cut off, and may have been billed or not."""
        if tokens is None:
            self.uncertain_usd += reserved_usd
        else:
            self._book(reserved_usd, tokens)
        self.reserved_usd -= reserved_usd
        if self.reserved_usd < 1e-12:  # what rounding leaves
            self.reserved_usd = 0.0
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _book(self, reserved_usd: float, tokens: Tokens) -> None:
        self.input_tokens += tokens.input
        self.output_tokens += tokens.output
        self.cached_tokens += tokens.cached
        if self.price is None:
            return
        cost_usd = self.price.cost_usd(tokens)
        self.spent_usd += cost_usd
        if reserved_usd:
            self._excess = max(self._excess, self._excess * cost_usd / reserved_usd)
