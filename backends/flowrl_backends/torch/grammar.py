"""Grammars: the tokens that may come next, so that a whole response has the required form.

    states = Grammars(context, vocab_size)
    state = states.begin(regex("[0-9]+"), tokens_so_far)
    state.allowed()      # bool [V]: continuations, and stop tokens if the response is complete
    state.take(token)

The llguidance library follows the grammar byte by byte; it gets the bytes of every token, as the
tokenizer of the model folder decodes them. Special tokens have no bytes and are never allowed,
except for the stop tokens at the end of a complete response. A response that ends for another
reason (`length`, `abort`) is the beginning of a valid one.

Bytes that the grammar determines completely may be restricted to the tokens with which the
tokenizer itself writes them; the set of possible texts does not change.

JSON is written without spaces, and an object's members in the order of the schema. Regular
expressions are those of Rust's `regex`: no look-around, no back-references.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from flowrl.backend.batch import Ints, Mask
from flowrl.backend.protocols import PolicyContext
from flowrl.errors import BackendError
from flowrl.specs.grammar import Grammar, JsonSchema, Regex

if TYPE_CHECKING:
    import llguidance


class GrammarState:
    """The state of one response in its grammar."""

    __slots__ = ("_matcher", "_vocab_size", "_where")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, where: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._where = where

    def allowed(self) -> Mask:
        """Returns bool `[V]`, true at the tokens that may come next.

        Raises:
            BackendError: No token is allowed: the vocabulary cannot write what the grammar needs.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BackendError(
                "no token goes on with what the grammar asks for",
                where=self._where,
                found=_first_line(self._matcher.get_error()),
                hint="ask for characters that the tokenizer has, or for another grammar",
            )
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def take(self, token: int) -> None:
        """Appends an allowed token; a stop token ends the response.

        Raises:
            BackendError: The token is not allowed.
        """
        if not self._matcher.consume_token(token):
            raise BackendError(
                "a token is not of the grammar",
                where=self._where,
                found=f"token {token}: {_first_line(self._matcher.get_error())}",
            )


class Grammars:
    """Grammars for the tokenizer of one model folder, each compiled once.

    Args:
        context: The role's context, with the model folder and the stop tokens.
        vocab_size: The number of rows of the model's output.

    Raises:
        BackendError: llguidance is not installed, no token ends a response, or the bytes of the
            tokenizer's tokens are not known.
    """

    def __init__(self, context: PolicyContext, vocab_size: int) -> None:
        self._where = f"roles.{context.role}"
        if not context.stop_token_ids:
            raise BackendError(
                "a response of a grammar ends with a stop token, and there is none",
                where=self._where,
            )
        try:
            import llguidance
        except ImportError as err:
            raise BackendError(
                "grammars need the llguidance library",
                where=self._where,
                found="not installed",
                hint="pip install 'flowrl[grammar]'",
            ) from err
        self._library = llguidance
        self._vocab_size = vocab_size
        words = _Words(context, vocab_size)
        self._tokenizer = llguidance.LLTokenizer(
            cast("llguidance.TokenizerWrapper", words),
            n_vocab=vocab_size,
            eos_token=list(context.stop_token_ids),
        )
        self._compiled: dict[Grammar, llguidance.LLMatcher] = {}

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar.

        Raises:
            BackendError: The grammar is not supported; with the reason.
        """
        if grammar in self._compiled:
            return
        matcher = self._library.LLMatcher(self._tokenizer, self._text_of(grammar), log_level=0)
        if matcher.is_error():
            raise BackendError(
                f"the grammar ({grammar.kind}) cannot be held to",
                where=self._where,
                found=_first_line(matcher.get_error()),
                hint="regular expressions are those of Rust: no look-around, no back-references"
                if isinstance(grammar, Regex)
                else "see which JSON Schema keywords llguidance knows",
            )
        self._compiled[grammar] = matcher

    def begin(self, grammar: Grammar, tokens: Ints, where: str) -> GrammarState:
        """Returns the state of a response that already has `tokens`.

        Args:
            grammar: The grammar.
            tokens: The tokens of the response.
            where: The name of the sample, for messages.

        Raises:
            BackendError: The grammar is not supported, or does not allow the tokens.
        """
        self.check(grammar)
        state = GrammarState(self._compiled[grammar].deep_copy(), self._vocab_size, where)
        for token in tokens.tolist():
            state.take(token)
        return state

    def _text_of(self, grammar: Grammar) -> str:
        matcher = self._library.LLMatcher
        if isinstance(grammar, Regex):
            return matcher.grammar_from_regex(grammar.pattern)
        if isinstance(grammar, JsonSchema):
            return matcher.grammar_from_json_schema(
                grammar.schema, overrides={"whitespace_flexible": False}
            )
        raise BackendError(
            f"the torch engine holds no grammar of kind {grammar.kind}",
            where=self._where,
            expected="regex or json_schema",
        )


class _Words:
    """The vocabulary in the form that llguidance requires (its `TokenizerWrapper`).

    Attributes:
        tokens: The bytes of each token; those of special tokens are their names, never read.
        special_token_ids: Tokens without bytes.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, context: PolicyContext, vocab_size: int) -> None:
        found, self._fast = token_bytes(context.model)
        self.eos_token_id = context.stop_token_ids[0]
        self._ids = {of: token for token, of in reversed(found.items()) if of}
        for stop in context.stop_token_ids:
            self._ids.pop(found.pop(stop, b""), None)
        self._found = found
        self._longest = max(map(len, self._ids), default=0)
        names = [found.get(token, b"") for token in range(vocab_size)]
        self.special_token_ids = [token for token, name in enumerate(names) if not name]
        self.tokens = [name or b"<%d>" % token for token, name in enumerate(names)]

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Tokens of bytes that the grammar leaves no choice about, as far as there are any."""
        raw = text.encode() if isinstance(text, str) else text
        try:
            own = self._fast.encode(raw.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            own = []
        if own and b"".join(self._found.get(token, b"\0") for token in own) == raw:
            return own
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        tokens: list[int] = []
        begin = 0
        while begin < len(raw):
            for end in range(min(len(raw), begin + self._longest), begin, -1):
                if raw[begin:end] in self._ids:
                    break
            else:
                return tokens  # what is left has no token; the grammar finds no way on
            tokens.append(self._ids[raw[begin:end]])
            begin = end
        return tokens


def token_bytes(folder: Path) -> tuple[dict[int, bytes], FastTokenizer]:
    """The bytes of each token that is not special, as the folder's tokenizer decodes it.

    Raises:
        BackendError: there is no tokenizer.json, or its decoder joins tokens otherwise than byte by
            byte.
    """
    path = folder / "tokenizer.json"
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as err:
        raise BackendError("the tokenizer cannot be read", where=str(path), found=str(err)) from err
    described = json.loads(written)
    fast = FastTokenizer.from_str(written)
    added = {entry["id"]: entry for entry in described.get("added_tokens") or ()}
    kinds = _decoder_kinds(described.get("decoder"))
    found: dict[int, bytes] = {}
    symbols = _byte_symbols()
    for word, token in fast.get_vocab(with_added_tokens=True).items():
        if token in added:
            found[token] = b"" if added[token]["special"] else word.encode()
        elif kinds == {"ByteLevel"}:
            found[token] = _from_symbols(word, symbols)
        elif kinds <= {"Replace", "ByteFallback", "Fuse"} and "ByteFallback" in kinds:
            found[token] = _from_piece(word)
        else:
            raise BackendError(
                "the bytes of this tokenizer's tokens are not known, which grammars and stops need",
                where=str(path),
                found=f"decoder {', '.join(sorted(kinds)) or 'none'}",
                expected="ByteLevel, or ByteFallback with pieces that are merely joined",
            )
    return {token: of for token, of in found.items() if of}, fast


def _decoder_kinds(decoder: dict[str, object] | None) -> set[str]:
    if decoder is None:
        return set()
    parts = decoder.get("decoders")
    if isinstance(parts, list):
        return set().union(*(_decoder_kinds(part) for part in parts))
    return {str(decoder["type"])}


def _byte_symbols() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _from_symbols(word: str, symbols: dict[str, int]) -> bytes:
    # A word with another character is not of the byte-level alphabet; it decodes to itself.
    if any(symbol not in symbols for symbol in word):
        return word.encode()
    return bytes(symbols[symbol] for symbol in word)


def _from_piece(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace("▁", " ").encode()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def forbidden_by(states: Sequence[GrammarState | None], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Returns bool `[n, V]`, true at tokens that the grammars of n rows do not allow."""
    forbidden = np.zeros((len(states), vocab_size), np.bool_)
    for row, state in enumerate(states):
        if state is not None:
            forbidden[row] = ~state.allowed()
    return forbidden
