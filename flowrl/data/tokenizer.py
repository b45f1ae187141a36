"""Encodes and decodes text with the `tokenizers` library and the files of a Hugging Face folder.

Token ids equal those of `transformers.AutoTokenizer` (5.24) on the same folder; Transformers
itself, which takes seconds to import, is not needed. As there, the post-processor of tokenizer.json
decides on BOS, and `add_bos_token` of tokenizer_config.json is not read. An EOS that it puts behind
a text is left out, because a prompt ends no text.

Text is tokenised once, before a rollout; what a policy generated is decoded for rewards and people
and never tokenised again. Prompts begin a sample; everything else is a piece in its middle
(`flowrl.data.tokenizer_files`).

A model's embedding often has more rows than the tokenizer has tokens. Such a row can be sampled
like any other; it is decoded as `<unused900>`, by its id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from tokenizers import Encoding, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from flowrl.backend.batch import Ints, Mask
from flowrl.data.conversations import Message, message_text
from flowrl.data.tokenizer_files import (
    add_missing_tokens,
    check_config_ids,
    check_tokenizer_ids,
    end_tokens,
    missing_tokenizer,
    model_vocabulary,
    read_object,
    special_tokens,
    tokenizer_of_pieces,
)
from flowrl.errors import DataError

if TYPE_CHECKING:
    from flowrl.data.chat import ChatTemplate

ChatMode: TypeAlias = Literal["auto", "never", "always"]
"""When a prompt is wrapped as a user's turn; `auto`: where the folder has a chat template."""

_MANY_TOKENS = 32_768
"""The tokens from which the library's threads save time; for fewer, starting them takes longer."""

_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        end_id: The token that supervised responses end with: the tokenizer's `eos_token`, or the
            model's first end token where the tokenizer names none.
        stop_ids: Tokens that end a generated response: `end_id`, then `eos_token_id` of
            generation_config.json, or of config.json where that has none.
        vocab_size: One more than the largest token id.
        model_vocab_size: Rows of the model's embedding; `vocab_size` where config.json has none.
        names_all: True if each of these rows is one of its tokens.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        end_id: int,
        stop_ids: tuple[int, ...],
        chat: ChatTemplate | None,
        folder: Path,
        bos: str | None = None,
        model_vocab_size: int | None = None,
        alphabet_key: str = "",
    ) -> None:
        self._fast = fast
        self._pieces = tokenizer_of_pieces(fast)
        self.alphabet_key = alphabet_key
        self._chat = chat
        self._folder = folder
        self.end_id = end_id
        self.stop_ids = stop_ids
        self._characters = _known_characters(fast)
        ids = np.fromiter(fast.get_vocab(with_added_tokens=True).values(), np.int64)
        self.vocab_size = int(ids.max()) + 1
        self.model_vocab_size = model_vocab_size or self.vocab_size
        self._has_token = np.zeros(self.vocab_size, np.bool_)
        self._has_token[ids] = True
        self.names_all = len(ids) >= self.model_vocab_size
        self._bos_id = _bos_of(fast, bos, stop_ids)
        self._written = {
            token: self._pieces.decode([token], skip_special_tokens=False)
            for token in (*stop_ids, self._bos_id)
            if token is not None
        }

    @classmethod
    def load(cls, folder: Path, *, alphabet_key: str = "") -> Tokenizer:
        """Reads `tokenizer.json` and the other files of its folder.

        Args:
            alphabet_key: The config key that lists its characters, for messages.

        Raises:
            DataError: A file is missing or broken, no file names the token that ends a response, or
                a token id is none of the model's.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise missing_tokenizer(folder)
        try:
            fast = FastTokenizer.from_file(str(path))
        # The library raises plain Exception for whatever it cannot read.
        except Exception as reason:
            raise DataError(
                "the tokenizer cannot be read",
                where=str(path),
                found=str(reason)[:200],
                hint="save it again with a current version of transformers",
            ) from reason
        # A file may carry the truncation of the calls it was made with; prompts are never cut.
        fast.no_truncation()
        fast.no_padding()
        configs = {folder / name: read_object(folder / name) for name in _CONFIGS}
        size = model_vocabulary(configs[folder / "config.json"], folder / "config.json")
        check_config_ids(configs, size)
        config = configs[folder / "tokenizer_config.json"]
        special = special_tokens(config, read_object(folder / "special_tokens_map.json"))
        added = add_missing_tokens(fast, config, special)
        check_tokenizer_ids(path, read_object(path), fast, added, size)
        end_id, stop_ids = end_tokens(fast, special, configs, folder)
        return cls(
            fast,
            end_id=end_id,
            stop_ids=stop_ids,
            chat=_chat_template(folder, config, special),
            folder=folder,
            bos=special.get("bos_token"),
            model_vocab_size=size,
            alphabet_key=alphabet_key,
        )

    def encode_prompt(
        self,
        prompt: str | Sequence[Message],
        chat: ChatMode = "auto",
        *,
        tools: Sequence[object] = (),
        args: Mapping[str, object] | None = None,
        prefix: str = "",
    ) -> Ints:
        """Returns int64 `[P]`, a prompt after the special tokens that the model expects in front.

        Args:
            prompt: A text, or a conversation.
            tools: The tools of a conversation.
            args: Further variables of the chat template.
            prefix: The text with which the response begins.

        Raises:
            DataError: A character outside the vocabulary, `always` or `args` without a chat
                template, or a conversation that needs one.
        """
        if chat == "always" and self._chat is None:
            raise DataError(
                "the tokenizer has no chat template",
                where=str(self._folder),
                found="data.chat_template=always",
                hint="set data.chat_template=auto, or add chat_template.jinja to the folder",
            )
        as_turn: list[Message] = [{"role": "user", "content": prompt}]
        messages = as_turn if isinstance(prompt, str) else prompt
        if self._chat is not None and chat != "never":
            # The template prints the special tokens itself.
            text = self._chat.render(messages, tools, args) + prefix
            return _ids(self._encode(text, self._fast, special=False))
        if args:
            raise DataError(
                "data.chat_args are variables of a chat template, and none is used",
                where=str(self._folder),
                found=", ".join(sorted(args)),
                hint="leave data.chat_args out, or use a model whose folder has a chat template",
            )
        encoding = self._encode(self._only_text(messages, tools) + prefix, self._fast, special=True)
        # The mask is true at what the post-processor added, and at no token of the text.
        own = np.flatnonzero(np.equal(encoding.special_tokens_mask, 0))
        return _ids(encoding)[: own[-1] + 1 if len(own) else None]

    def _only_text(self, messages: Sequence[Message], tools: Sequence[object]) -> str:
        """Returns the text of a conversation of one user's turn, which needs no chat template."""
        if len(messages) == 1 and messages[0]["role"] == "user" and not tools:
            return message_text(messages[0])
        never = "data.chat_template=never" if self._chat is not None else ""
        what = "with tools" if tools else "of several messages"
        raise DataError(
            f"a conversation {what} needs a chat template",
            where=str(self._folder),
            found=f"the roles {', '.join(str(m['role']) for m in messages)}, and "
            + (never or "a tokenizer without a chat template"),
            hint=f"leave {never} out"
            if never
            else "add chat_template.jinja to the model's folder; or make one text of a row "
            "(data.prompt), without data.system, data.few_shot and data.tools",
        )

    def encode(self, text: str) -> Ints:
        """Returns int64 `[n]`, a text in the middle of a sample: nothing is put around it."""
        return _ids(self._encode(text, self._pieces, special=False))

    def encode_response(self, text: str) -> Ints:
        """Returns int64 `[R]`, a response and the end token."""
        return np.append(self.encode(text), np.int64(self.end_id))

    def decode(self, ids: Sequence[int] | Ints) -> str:
        """Returns the text of tokens from the beginning of a sample on, without special tokens."""
        return self._decode(np.asarray(ids, np.int64), self._fast)

    def without_end(self, ids: Ints) -> Ints:
        """Returns the tokens of a response without the stop token that it ends with, if any."""
        ends = len(ids) > 0 and int(ids[-1]) in self.stop_ids
        return ids[:-1] if ends else ids

    def visible(self, ids: Sequence[int] | Ints) -> str:
        """Returns the text of tokens from the beginning of a sample on, special tokens included."""
        return self._decode(np.asarray(ids, np.int64), self._fast, skip_special=False)

    def decode_many(self, batch: Sequence[Sequence[int] | Ints]) -> list[str]:
        """Returns the texts of many pieces in the middle of samples, in one call.

        Equal sequences are decoded once: the members of a group often give the same answer.
        """
        if not len(batch):
            return []
        arrays = [np.asarray(ids, np.int64) for ids in batch]
        keys = [array.tobytes() for array in arrays]
        distinct = dict(zip(keys, arrays, strict=True))
        together = np.concatenate(list(distinct.values()))
        if self.without_token(together).any():
            texts = [self._decode(ids, self._pieces) for ids in distinct.values()]
        elif len(together) < _MANY_TOKENS:
            texts = [
                self._pieces.decode(ids.tolist(), skip_special_tokens=True)
                for ids in distinct.values()
            ]
        else:
            lists = [ids.tolist() for ids in distinct.values()]
            texts = self._pieces.decode_batch(lists, skip_special_tokens=True)
        by_key = dict(zip(distinct, texts, strict=True))
        return [by_key[key] for key in keys]

    def ends_of(self, text: str, ids: Ints) -> list[int]:
        """Returns the places of the tokens in which the occurrences of a text end, in order.

        Args:
            ids: int64 `[n]`, a piece in the middle of a sample.
        """
        whole = self.decode_many([ids])[0]
        ends, start = [], whole.find(text)
        while start >= 0:
            ends.append(start + len(text))
            start = whole.find(text, ends[-1])
        if not ends:
            return []
        pieces = self.decode_many([ids[i : i + 1] for i in range(len(ids))])
        if "".join(pieces) == whole:
            last = np.searchsorted(np.cumsum([len(piece) for piece in pieces]), ends)
            return list(dict.fromkeys(last.tolist()))

        def reaches(place: int, end: int) -> bool:
            # Of the bytes of one character, several tokens may have a part.
            return self.decode_many([ids[: place + 1]])[0].startswith(whole[:end])

        places = range(len(ids))
        reached = [bisect_left(places, True, key=partial(reaches, end=end)) for end in ends]
        return list(dict.fromkeys(reached))

    def without_token(self, ids: Ints) -> Mask:
        """Returns bool, true for ids that are none of the tokenizer's tokens."""
        inside = (ids >= 0) & (ids < self.vocab_size)
        return ~(inside & self._has_token[np.where(inside, ids, 0)])

    def unknown(self, text: str) -> list[str]:
        """Returns the characters of a text that the tokenizer does not know."""
        return [] if self._characters is None else sorted(set(text) - self._characters)

    def check(self, text: str) -> None:
        """Checks that the tokenizer knows every character of a text."""
        strange, key = self.unknown(text), self.alphabet_key
        if not strange:
            return
        raise DataError(
            "the text has characters that the tokenizer does not know",
            found=" ".join(map(repr, strange[:8])),
            hint=f"add them to {key}, take them out, or raise data.max_bad_rows to leave such "
            "rows out"
            if key
            else "take them out, or raise data.max_bad_rows to leave such rows out",
        )

    def check_response(self, text: str) -> None:
        """Checks that a text can be a response.

        Raises:
            DataError: The text has a character that the tokenizer does not know, or a token that
                ends a response or begins a text, which are added in their places.
        """
        self.check(text)
        for token, written in self._written.items():
            if written and written in text and token in self.encode(text):
                does = "ends a response" if token in self.stop_ids else "begins a text"
                raise DataError(
                    f"the response has the token {written!r} in its text, which {does}",
                    found=text if len(text) <= 60 else f"...{text[-57:]}",
                    hint="take it out of data.solution (of pairs data.rejected too), for the token "
                    "that ends a response is put behind it; or raise data.max_bad_rows to leave "
                    "such rows out",
                )

    def num_bos(self, prompt_ids: Ints) -> int:
        """Returns how often a prompt has the token that begins a text."""
        return 0 if self._bos_id is None else int((prompt_ids == self._bos_id).sum())

    def repeats_bos(self, prompt: str, prompt_ids: Ints) -> str:
        """Returns the token that begins a text where a prompt has it and gets another one in front.

        Args:
            prompt_ids: The result of `encode_prompt` for the prompt.
        """
        if self._bos_id is None or not len(prompt_ids) or prompt_ids[0] != self._bos_id:
            return ""
        written = self._written[self._bos_id]
        twice = prompt.lstrip().startswith(written) and self.num_bos(prompt_ids) > 1
        return written if twice else ""

    def _decode(self, ids: Ints, fast: FastTokenizer, *, skip_special: bool = True) -> str:
        """Returns the text of tokens; ids that are not the tokenizer's are written by a name.

        Args:
            fast: The tokenizer that decodes the tokens before the first such id.
        """
        texts: list[str] = []
        begin = 0
        for place in np.flatnonzero(self.without_token(ids)).tolist():
            if begin < place:
                part = ids[begin:place].tolist()
                texts.append(fast.decode(part, skip_special_tokens=skip_special))
            texts.append(f"<unused{ids[place]}>")
            begin, fast = place + 1, self._pieces
        texts.append(fast.decode(ids[begin:].tolist(), skip_special_tokens=skip_special))
        return "".join(texts)

    def _encode(self, text: str, fast: FastTokenizer, *, special: bool) -> Encoding:
        self.check(text)
        try:
            return fast.encode(text, add_special_tokens=special)
        # The library raises plain Exception, such as for a character that has no token.
        except Exception as reason:
            raise DataError(
                "the tokenizer cannot encode the text", found=str(reason)[:200]
            ) from reason


def _ids(encoding: Encoding) -> Ints:
    return np.asarray(encoding.ids, np.int64)


def _bos_of(fast: FastTokenizer, named: str | None, stop_ids: Sequence[int]) -> int | None:
    """Returns the token that begins a text: the named one, or the one put in front of all."""
    if named is not None:
        return fast.token_to_id(named)
    bare = fast.encode("", add_special_tokens=True)
    added = [i for i, own in zip(bare.ids, bare.special_tokens_mask, strict=True) if own]
    return added[0] if added and added[0] not in stop_ids else None


def _known_characters(fast: FastTokenizer) -> frozenset[str] | None:
    """Returns the characters of a character tokenizer; None for tokenizers that take any text.

    A byte-level vocabulary that lacks some bytes and has no unknown token drops them silently.
    """
    model = fast.model
    if not isinstance(model, models.BPE) or model.unk_token is not None or model.byte_fallback:
        return None
    if "ByteLevel" not in repr(fast.pre_tokenizer):
        return None
    vocab = fast.get_vocab(with_added_tokens=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab):
        return None
    symbols = {c: byte_level.pre_tokenize_str(c)[0][0] for c in map(chr, range(128))}
    return frozenset(c for c, symbol in symbols.items() if symbol in vocab)


def _chat_template(
    folder: Path, config: Mapping[str, object], special: Mapping[str, str]
) -> ChatTemplate | None:
    """Returns chat_template.jinja, else the default `chat_template` of tokenizer_config.json."""
    from flowrl.data.chat import ChatTemplate  # Jinja is for templates alone

    path = folder / "chat_template.jinja"
    if path.is_file():
        extra = folder / "additional_chat_templates" / "tool_use.jinja"
        with_tools = extra.read_text(encoding="utf-8") if extra.is_file() else None
        return ChatTemplate(path.read_text(encoding="utf-8"), special, path, with_tools)
    value, with_tools = config.get("chat_template"), None
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value, with_tools = named.get("default"), named.get("tool_use")
    if isinstance(value, str):
        return ChatTemplate(value, special, folder / "tokenizer_config.json", with_tools)
    return None
