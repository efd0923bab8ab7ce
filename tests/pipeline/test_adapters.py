"""Models of the package `transformers`, cut into sublayers, against their own forward pass."""

import pytest
import torch

from syncline.pipeline.blocks import Blocks

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


def test_vit():
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)
    model = transformers.ViTForImageClassification(config).eval()
    x, y = torch.randn(3, 3, 32, 32), torch.tensor([0, 1, 2])
    blocks = Blocks.of(model)
    assert (len(blocks), blocks.inputs) == (3, 1)
    expected = model(pixel_values=x, labels=y)
    assert torch.allclose(blocks.forward(x), expected.logits, atol=1e-6)
    assert torch.allclose(blocks.loss(blocks.forward(x), y), expected.loss, atol=1e-6)


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForQuestionAnswering"])
def test_bert(head):
    model = getattr(transformers, head)(transformers.BertConfig(**SMALL, vocab_size=100, num_labels=2)).eval()
    tokens, segments = torch.randint(1, 100, (3, 12)), torch.randint(0, 2, (3, 12))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    answering = head == "BertForQuestionAnswering"
    targets = (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])) if answering else (torch.tensor([0, 1, 1]),)
    names = ("start_positions", "end_positions") if answering else ("labels",)
    blocks = Blocks.of(model)
    assert (len(blocks), blocks.inputs) == (3, 3)
    output = blocks.forward(tokens, mask, segments)
    expected = model(
        input_ids=tokens, attention_mask=mask, token_type_ids=segments, **dict(zip(names, targets, strict=True))
    )
    assert torch.allclose(blocks.loss(output, *targets), expected.loss, atol=1e-6)
    assert len(blocks.names(-1)) == 5
