"""`BatchLayout`, and the device's view of it that a step has."""

import pytest
import torch

from triton_mla import BatchLayout
from triton_mla.paths import ABSORBED, MHA, PathRule
from triton_mla.step import StepPlan

RULE = PathRule(MHA)


def layout(**changes):
    good = {"query_lens": [1, 18, 2], "seq_lens": [5, 20, 0], "page_ids": [[7], [3, 1], []], "page_size": 16, "prompt_lens": [2, 20, 0]}
    return BatchLayout(**{**good, **changes})


def test_tensors():
    table, starts, lens = layout().tensors("cpu")
    assert table.tolist() == [[7, 0], [3, 1], [0, 0]] and starts.tolist() == [0, 1, 19, 21] and lens.tolist() == [5, 20, 0]
    assert all(tensor.dtype == torch.int32 for tensor in (table, starts, lens))
    assert (layout().num_tokens, layout().max_seq_len, layout().is_decode) == (21, 20, False)
    assert BatchLayout([], [], []).tensors("cpu")[0].shape == (0, 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"query_lens": [1, 2]}, "equally many"),
        ({"query_lens": [1, 21, 2]}, r"query_lens\[1\]=21"),
        ({"seq_lens": [17, 20, 0]}, r"seq_lens\[0\]=17"),
        ({"query_lens": ["a", 18, 2]}, r"query_lens\[0\]='a' must be an int"),
        ({"query_lens": [1, 18.0, 2]}, r"query_lens\[1\]=18.0 must be an int"),
        ({"seq_lens": [5, 20, None]}, r"seq_lens\[2\]=None must be an int"),
        ({"query_lens": 3}, "query_lens=3 must be a sequence"),
        ({"page_ids": None}, "page_ids=None must be a sequence"),
        ({"page_ids": [[-1], [3, 1], []]}, r"page_ids\[0\]\[0\]=-1 must be an int from 0"),
        ({"page_ids": [[7], [3, 2**31], []]}, r"page_ids\[1\]\[1\]=2147483648 must be an int from 0"),
        ({"page_ids": [[1.5], [3, 1], []]}, r"page_ids\[0\]\[0\]=1.5 must be an int from 0"),
        ({"page_ids": [["a"], [3, 1], []]}, r"page_ids\[0\]\[0\]='a' must be an int from 0"),
        ({"page_ids": [7, [3, 1], []]}, r"page_ids\[0\]=7 must be a sequence of ints"),
        ({"page_ids": [[7], [3, 3], []]}, r"page_ids\[1\]\[1\]=3 must be a page of its own; page_ids\[1\]\[0\] is the same"),
        ({"page_ids": [b"\x07\0\0\0", [3, 1], []]}, r"page_ids\[0\]=b'.*' must be a sequence of ints"),
        ({"page_ids": [[7], bytearray(8), []]}, r"page_ids\[1\]=bytearray.* must be a sequence of ints"),
        ({"page_ids": ["7", [3, 1], []]}, r"page_ids\[0\]='7' must be a sequence of ints"),
        ({"query_lens": b"\1\2\2"}, "query_lens=b'.*' must be a sequence"),
        ({"prompt_lens": b"\2\5\0"}, "prompt_lens=b'.*' must be a sequence"),
        ({"page_size": None}, "page_size=None must be 1 or a multiple of 16"),
        ({"page_size": 8}, "page_size=8"),
        ({"prompt_lens": [2, 20]}, "prompt_lens has 2 requests"),
        ({"prompt_lens": [2, 20, -1]}, r"prompt_lens\[2\]=-1"),
        ({"prompt_lens": [2, None, 0]}, r"prompt_lens\[1\]=None"),
        ({"prompt_lens": [2, True, 0]}, r"prompt_lens\[1\]=True must be an int"),
        ({"seq_lens": [5, 20, False]}, r"seq_lens\[2\]=False must be an int"),
    ],
)
def test_bad_layouts(changes, word):
    with pytest.raises(ValueError, match=word):
        layout(**changes)


def test_requests_may_share_pages():
    assert layout(page_ids=[[3], [3, 1], []]).table().tolist() == [[3, 0], [3, 1], [0, 0]]


def test_slots_of_a_step():
    plan = StepPlan.from_layout(layout(), paths=RULE, device="cpu")
    assert plan.slot_mapping.tolist() == [7 * 16 + 4, *range(3 * 16 + 2, 4 * 16), *range(16, 20), -1, -1]
    assert plan.num_tokens == 21 and not plan.padded


def test_a_form_whose_rows_lie_together_is_a_view():
    plan = StepPlan.from_layout(layout(), paths=RULE, device="cpu")
    assert plan.mha.tokens == slice(1, 19) and plan.mha.block_table.tolist() == [[3, 1]]
    assert (plan.mha.cu_seqlens_q.tolist(), plan.mha.seq_lens.tolist(), plan.mha.max_seq_len) == ([0, 18], [20], 20)
    assert plan.absorbed.tokens.tolist() == [0, 19, 20] and plan.absorbed.block_table.tolist() == [[7, 0], [0, 0]]
    assert (plan.absorbed.cu_seqlens_q.tolist(), plan.absorbed.seq_lens.tolist()) == ([0, 1, 3], [5, 0])
    assert not plan.absorbed.one_each
    rows = torch.arange(21)
    assert plan.mha.take(rows).tolist() == list(range(1, 19)) and plan.absorbed.take(rows).tolist() == [0, 19, 20]


def test_lengths_of_generated_rows_may_be_the_devices():
    """Those of the host bound them; a prompt's are its own."""
    whole = layout()
    table, slots = whole.table(), torch.arange(21)

    def plan(generated_lens, rule=RULE):
        return StepPlan.from_lengths(whole.query_lens, whole.seq_lens, table, slots, page_size=16, paths=rule, prompt_lens=whole.prompt_lens,
                                     generated_lens=generated_lens)

    lens = torch.tensor([4, 13, 0], dtype=torch.int32)
    assert plan(lens).absorbed.seq_lens.tolist() == [4, 0] and plan(lens).mha.seq_lens.tolist() == plan(None).mha.seq_lens.tolist() == [20]
    assert plan(lens).absorbed.max_seq_len == plan(None).absorbed.max_seq_len == 5
    alone = plan(lens, PathRule(ABSORBED)).absorbed
    assert alone.seq_lens.tolist() == [4, 13, 0] and alone.seq_lens.data_ptr() == lens.data_ptr()
    for wrong in (lens[:2], lens.long(), [4, 13, 0]):
        with pytest.raises(ValueError, match="generated_lens"):
            plan(wrong)


def test_one_form_alone_takes_the_batch_as_it_is():
    plan = StepPlan.from_layout(layout(), paths=PathRule(ABSORBED), device="cpu")
    assert plan.mha is None and plan.absorbed.tokens == slice(0, 21) and not plan.absorbed.one_each
    decode = StepPlan.from_layout(layout(query_lens=[1, 1, 1], prompt_lens=[2, 3, 0]), paths=RULE, device="cpu")
    assert decode.mha is None and decode.absorbed.one_each and decode.absorbed.tokens == slice(0, 3)


def test_a_chunk_over_the_end_of_the_prompt_has_both_forms():
    plan = StepPlan.from_layout(layout(query_lens=[1, 18, 2], prompt_lens=[5, 15, 0]), paths=RULE, device="cpu")
    assert plan.mha.tokens == slice(0, 14) and plan.mha.seq_lens.tolist() == [5, 15]
    assert plan.absorbed.tokens == slice(14, 21) and plan.absorbed.seq_lens.tolist() == [20, 0]
    assert plan.absorbed.cu_seqlens_q.tolist() == [0, 5, 7]
