"""Counts of one run: calls, second tries, failures by class, troubles with the server, money."""

from __future__ import annotations

from collections import Counter

from samrag.calls import FailureReason
from samrag.engines.costs import Ledger


class Meter:
    """Counts what an engine and its backend did."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.asked = 0
        """Requests answered by the model."""
        self.stored = 0
        """Requests answered from the store."""
        self.second_tries: Counter[str] = Counter()
        """Requests made after an unusable reply, by what was wrong with it."""
        self.failures: Counter[FailureReason] = Counter()
        """Calls without a usable reply in the end."""
        self.troubles: Counter[str] = Counter()
        """Attempts that came to nothing and were mostly tried again, by class."""

    def note(self, remaining: int | None = None) -> str:
        """A few words for a progress bar.

        Args:
            remaining: Calls that are still to be asked, where the stage knows; gives a projection of the cost.
        """
        words = [f"{self.asked:,} asked", f"{self.stored:,} stored", f"{sum(self.failures.values()):,} failed"]
        if self.ledger.price is not None:
            spent = self.ledger.spent_usd + self.ledger.uncertain_usd
            of = "" if self.ledger.budget_usd is None else f" of ${self.ledger.budget_usd:,.2f}"
            words.append(f"${spent:,.2f}{of}")
            if remaining is not None and self.asked:
                words.append(f"about ${spent + remaining * spent / self.asked:,.2f} in all")
        return ", ".join(words)

    def table(self) -> str:
        """Everything that was counted and is not zero, as an aligned table."""
        ledger = self.ledger
        rows: list[tuple[str, str]] = [("requests answered by the model", f"{self.asked:,}")]
        rows.append(("requests answered from the store", f"{self.stored:,}"))
        rows += [(f"second try: {reason}", f"{count:,}") for reason, count in sorted(self.second_tries.items())]
        rows += [(f"attempt failed: {name}", f"{count:,}") for name, count in sorted(self.troubles.items())]
        rows += [(f"call failed: {reason}", f"{count:,}") for reason, count in sorted(self.failures.items())]
        if ledger.input_tokens or ledger.output_tokens:
            rows.append(("tokens in (of these cached)", f"{ledger.input_tokens:,} ({ledger.cached_tokens:,})"))
            rows.append(("tokens out", f"{ledger.output_tokens:,}"))
        if ledger.price is not None:
            rows.append(("spent", f"${ledger.spent_usd:,.4f}"))
            if ledger.uncertain_usd:
                rows.append(("perhaps billed besides, at most", f"${ledger.uncertain_usd:,.4f}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:>12}" for name, value in rows)
