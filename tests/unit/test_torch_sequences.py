"""Sequences that tensor ranks divide: which arguments of a pass can be divided."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from mpishard.torch.sequences import tokens_of  # noqa: E402

WORDS = torch.zeros(2, 6, dtype=torch.long)


def test_arguments_have_the_tokens_of_the_words():
    others = {"labels": WORDS, "attention_mask": WORDS, "position_ids": torch.arange(6)[None], "pixel_values": None}
    assert tokens_of({"input_ids": WORDS, "num_items_in_batch": torch.tensor(9), **others}) == 6
    assert tokens_of({"inputs_embeds": torch.zeros(2, 5, 3)}) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": WORDS}, "needs input_ids"),
        ({"input_ids": WORDS[0]}, "needs input_ids"),
        ({"input_ids": WORDS, "labels": WORDS[:, 1:]}, r"labels has the shape \(2, 5\).*6 tokens"),
        (
            {"input_ids": WORDS, "attention_mask": torch.ones(2, 1, 6, 6)},
            r"attention_mask has the shape \(2, 1, 6, 6\)",
        ),
        ({"input_ids": WORDS, "pixel_values": torch.ones(2, 3)}, r"pixel_values, of shape \(2, 3\)"),
        ({"input_ids": WORDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "position_ids that begin anew"),
        ({"input_ids": WORDS, "attention_mask": WORDS}, "padding in front"),
        ({"input_ids": WORDS, "past_key_values": object()}, "past_key_values"),
        ({"input_ids": WORDS, "logits_to_keep": 1}, "logits_to_keep"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_what_cannot_be_divided_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        tokens_of(given)
