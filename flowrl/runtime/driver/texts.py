"""Texts and data rows of samples, which stay in the driver and never become tensors.

A rollout's responses are decoded by its driver as they end; those of examples and pairs are decoded
here, when something reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flowrl.backend.batch import Mask
from flowrl.data import Row, Tokenizer
from flowrl.data.templates import field_value
from flowrl.errors import DataError
from flowrl.ids import NodeId
from flowrl.runtime.driver.payloads import Array, Payload, SampleSet
from flowrl.specs.maps import ROW_PREFIX


class Texts:
    """The texts and rows of a stage's samples.

    Args:
        tokenizers: The tokenizer of each rollout, source and join.
    """

    def __init__(self, tokenizers: Mapping[NodeId, Tokenizer]) -> None:
        self._tokenizers = tokenizers

    def response(self, origin: NodeId, payload: Payload) -> str:
        """Returns the text of a response, as rewards read it.

        Args:
            origin: The rollout, the source or the join of the sample.
        """
        if payload.text or payload.finish is not None:
            return payload.text
        tokenizer = self._tokenizers[origin]
        return tokenizer.decode_many([tokenizer.without_end(payload.tokens)])[0]

    def step_ends(self, samples: SampleSet, separator: str) -> Mask:
        """Returns bool `[T]`, true at the last token of each step of a response.

        A step ends at the token in which the separator ends, or with the response, unless only the
        stop token is left. Tokens that the policy did not produce end no step.
        """
        sequences, tokenizer = samples.sequences, self._tokenizers[samples.origin]
        ends = np.zeros(len(sequences.tokens), np.bool_)
        for number, payload in enumerate(samples.payloads):
            tokens = payload.tokens
            places = tokenizer.ends_of(separator, tokens)
            before_stop = len(tokenizer.without_end(tokens)) - 1
            if before_stop >= 0 and before_stop not in places:
                places.append(len(tokens) - 1)
            begin = int(sequences.offsets[number + 1]) - len(tokens)
            ends[[begin + place for place in places]] = True
        return np.asarray(ends & sequences.response_mask, np.bool_)

    def held(self, samples: SampleSet, name: str, *, reader: str) -> Array:
        """Returns objects `[N]`: a text of each sample, or a field of its data row.

        Args:
            name: `text`, `prompt_text`, or `row.NAME`.
            reader: What reads it, for messages.

        Raises:
            DataError: A data row does not have the field.
        """
        values = np.empty(len(samples), np.object_)
        for place, payload in enumerate(samples.payloads):
            row = payload.item.row
            if name == "text":
                values[place] = self.response(samples.origin, payload)
            elif name == "prompt_text":
                values[place] = row.prompt
            else:
                values[place] = row_value(row, name.removeprefix(ROW_PREFIX), reader=reader)
        return values


def row_value(row: Row, field: str, *, reader: str) -> object:
    """Returns the value of a field of a data row.

    Args:
        field: Its name; of a field inside another its path.
        reader: What reads it, for messages.

    Raises:
        DataError: The row does not have the field.
    """
    try:
        return field_value(row.fields, field, key=reader)
    except DataError as error:
        error.where = row.where
        raise
