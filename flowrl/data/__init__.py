"""Data rows, tokenizers, model folders and the prompt cursor.

rows = load_rows(config.data.train, config.data, split="train")
folder = prepare_model_folder(config.roles["actor"], run_folder / "model", rows)
tokenizer = Tokenizer.load(folder)
prompts = encode_prompts(rows, tokenizer, config.data)
cursor = PromptCursor(prompts, seed=config.seed)
batch = cursor.take(config.train.prompts_per_step)
"""

from flowrl.data.cursor import (
    Prompt,
    PromptCursor,
    PromptItem,
    PromptSet,
    encode_prompts,
    encoded_rows,
    fingerprint,
)
from flowrl.data.mixture import PromptMixture, source_field
from flowrl.data.model_folder import check_model_folder, prepare_model_folder
from flowrl.data.row_reader import load_rows
from flowrl.data.rows import Row, RowNeeds, Rows, Split
from flowrl.data.tokenizer import Tokenizer

__all__ = [
    "Prompt",
    "PromptCursor",
    "PromptItem",
    "PromptMixture",
    "PromptSet",
    "Row",
    "RowNeeds",
    "Rows",
    "Split",
    "Tokenizer",
    "check_model_folder",
    "encode_prompts",
    "encoded_rows",
    "fingerprint",
    "load_rows",
    "prepare_model_folder",
    "source_field",
]
