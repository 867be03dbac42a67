"""What an answer took, as each dialect writes it: tokens, and the bytes of its cache beside those of the full cache."""

from __future__ import annotations

from typing import Any

from kvsketch.serve.doubtful import DoubtfulTicket
from kvsketch.serve.requests import Ticket
from kvsketch.serve.service import Answer


def chat_usage(answer: Answer) -> dict[str, Any]:
    """Of chat completions and completions."""
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens}, **_own(answer),
    }  # fmt: skip


def response_usage(answer: Answer) -> dict[str, Any]:
    """Of responses."""
    return {
        "input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}, **_own(answer),
    }  # fmt: skip


def message_usage(answer: Answer, begun: bool = True) -> dict[str, Any]:
    """Of Anthropic's messages, whose input tokens are those that were read; not `begun`: what is known before that."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens, "output_tokens": answer.tokens,
        "cache_read_input_tokens": answer.cached_tokens, "cache_creation_input_tokens": 0,
        **(_own(answer) if begun else {}),
    }  # fmt: skip


def _own(answer: Answer) -> dict[str, Any]:
    """What other servers do not tell; the bytes are those at the first token, of all texts together."""
    tickets: list[Ticket] = [choice.ticket for choice in answer.choices]
    watched = [ticket for ticket in tickets if isinstance(ticket, DoubtfulTicket)]
    return {
        "doubt": answer.doubt,
        "kvsketch": {
            "prefill_tokens": answer.prompt_tokens - answer.cached_tokens,
            "repeated_tokens": sum(ticket.tokens_repeated for ticket in tickets),
            "cache_bytes": sum(ticket.cache_bytes for ticket in tickets),
            "full_bytes": sum(ticket.full_bytes for ticket in tickets),
            **(_retried(watched) if watched else {}),
        },
    }


def _retried(tickets: list[DoubtfulTicket]) -> dict[str, Any]:
    """What became of answers that are asked again where they are in doubt; of several, the most doubtful first one."""
    refused = next((ticket.refused for ticket in tickets if ticket.refused), "")
    return {
        "retried": any(ticket.retried for ticket in tickets),
        "answered_by": ", ".join(dict.fromkeys(ticket.answered_by for ticket in tickets)),
        "first_doubt": round(max(ticket.first_doubt or 0.0 for ticket in tickets), 4),
        **({"not_retried": refused} if refused else {}),
    }
