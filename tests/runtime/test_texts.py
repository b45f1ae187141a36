"""Texts, rows and steps of samples, as maps and process reward models read them."""

from __future__ import annotations

import numpy as np
import pytest

import flowrl as fl
from flowrl.config.roles import CharTokenizer, FreshModel, RoleConfig
from flowrl.data import PromptItem, Row, Tokenizer, prepare_model_folder
from flowrl.errors import DataError
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.payloads import Payload, SampleSet, StepBatch, sample_set
from flowrl.runtime.driver.texts import Texts
from flowrl.specs import FinishReason
from tests.runtime.node_world import Worker, lowered, program_of

ROLLOUT = NodeId("actor.generate")
PROMPT = "0"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model") / "m"
    role = RoleConfig(
        model=FreshModel(architecture="qwen2", max_length=64),
        tokenizer=CharTokenizer(kind="char", alphabet="0123456789.; "),
    )
    return Tokenizer.load(prepare_model_folder(role, folder, []))


def said(tokenizer: Tokenizer, *responses: str, stopped: bool = True) -> SampleSet:
    """Samples of one prompt each, whose responses end with the stop token or were cut off."""
    groups = []
    for index, response in enumerate(responses):
        row = Row(
            index=index,
            prompt=PROMPT,
            answer="",
            solution="",
            fields={"meta": {"topic": f"t{index}"}},
            where=f"d.jsonl:{index + 1}",
        )
        item = PromptItem(
            epoch=0,
            index=index,
            group=GroupId(f"0/{index}"),
            row=row,
            prompt_ids=tokenizer.encode_prompt(PROMPT),
        )
        encode = tokenizer.encode_response if stopped else tokenizer.encode
        payload = Payload(item=item, tokens=encode(response), text=response)
        payload.finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        groups.append((item.group, [(SampleId(f"0/{index}/0"), payload)]))
    return sample_set(ROLLOUT, groups)


def ends(
    tokenizer: Tokenizer, response: str, *, separator: str = ". ", stopped: bool = True
) -> str:
    """A mark under each token of prompt and response: `^` where a step ends."""
    samples = said(tokenizer, response, stopped=stopped)
    found = Texts({ROLLOUT: tokenizer}).step_ends(samples, separator)
    return "".join("^" if end else " " for end in found)


def test_a_step_ends_with_its_separator_and_the_last_one_with_the_response(tokenizer):
    #                                 prompt, then the response and its stop token
    assert ends(tokenizer, "1. 23. 4") == "   ^   ^ ^"
    assert ends(tokenizer, "1. 23. 4", stopped=False) == "   ^   ^^"
    # Behind the last separator there is only the stop token.
    assert ends(tokenizer, "1. 23. ") == "   ^   ^ "
    assert ends(tokenizer, "123") == "    ^"
    assert ends(tokenizer, "") == "  "


def test_observations_of_an_environment_end_no_step(tokenizer):
    samples = said(tokenizer, "1. 2. 3", stopped=False)
    samples.sequences.response_mask[2:4] = False
    found = Texts({ROLLOUT: tokenizer}).step_ends(samples, ". ")
    assert np.flatnonzero(found).tolist() == [6, 7]


def test_a_row_without_the_field_that_a_map_reads_is_named_with_its_line(tokenizer):
    samples = said(tokenizer, "1", "2")
    texts = Texts({ROLLOUT: tokenizer})
    assert texts.held(samples, "row.meta.topic", reader="map").tolist() == ["t0", "t1"]
    assert texts.held(samples, "text", reader="map").tolist() == ["1", "2"]
    assert texts.held(samples, "prompt_text", reader="map").tolist() == [PROMPT, PROMPT]
    with pytest.raises(DataError, match=r"has no field 'level', which map reads") as caught:
        texts.held(samples, "row.level", reader="map")
    assert caught.value.where == "d.jsonl:1"


@fl.workflow
def process(prompts: fl.Prompts, actor: fl.Policy, prm: fl.RewardModel):
    rollout = actor.generate(prompts)
    tokens = prm.score(rollout, per="token")
    steps = prm.score(rollout, per="step", separator=". ")
    advantages = fl.advantage.reinforce_pp(None, rollout, token_rewards=tokens, whiten=False)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())
    advantages = fl.advantage.reinforce_pp(None, rollout, token_rewards=steps, whiten=False)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_a_process_reward_model_scores_tokens_or_the_ends_of_steps(tokenizer):
    workers = {"actor": Worker(), "prm": Worker()}
    program: BatchProgram = program_of(lowered(process), workers, texts=Texts({ROLLOUT: tokenizer}))
    samples = said(tokenizer, "1. 2", "3")
    step = StepBatch(sets={ROLLOUT: samples})
    step.values[ROLLOUT, "rollout_logprobs"] = np.zeros(9, np.float32)
    program.run(step)
    # The worker's number of a token is its place: 1 to 5 of the first response, 7 and 8.
    first, second = (batch.advantages for batch, _ in workers["actor"].updates)
    assert first.tolist() == [0, 15, 14, 12, 9, 5, 0, 15, 8]
    # The first response has steps that end at the places 3 and 5.
    assert second.tolist() == [0, 8, 8, 8, 5, 5, 0, 8, 8]
