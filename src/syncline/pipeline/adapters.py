"""Splits of models of the package `transformers`: ViT and BERT. They use names of modules alone, and import nothing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.pipeline.split import ADAPTERS, Part, Split


def _hidden(out: Any) -> Tensor:
    """The hidden states that a layer returns, alone or in front of attention weights."""
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of an encoder: its longest list of modules, whatever its name is in this version."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _right(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return (scores.argmax(-1) == labels).sum(), len(labels)


@ADAPTERS.register("ViTForImageClassification")
def vit(model: Any) -> Split:
    """Batches are (pixels, labels); blocks are whole layers."""
    vit, head = model.vit, model.classifier
    layers = [(Part(lambda x, layer=layer: _hidden(layer(x)), layer),) for layer in _layers(vit)]
    embed = Part(lambda pixels: vit.embeddings(pixels), vit.embeddings)
    scores = Part(lambda x: head(x[:, 0]), head)
    return Split([embed], layers, [vit.layernorm, scores], loss=F.cross_entropy, correct=_right)


def _bert(bert: Any, head: list[Part], **about: Any) -> Split:
    """Inputs are (tokens, mask of real tokens, segments); the mask travels with the hidden states."""

    def embed(tokens: Tensor, mask: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        hidden = bert.embeddings(input_ids=tokens, token_type_ids=segments)
        hide = (1.0 - mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        return hidden, hide

    def run(layer: Any, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return _hidden(layer(hidden, mask)), mask

    layers = [
        (Part(lambda x, mask, layer=layer: run(layer, x, mask), layer),)
        for layer in _layers(bert.encoder)
    ]  # fmt: skip
    return Split([Part(embed, bert.embeddings)], layers, head, inputs=3, **about)


@ADAPTERS.register("BertForSequenceClassification")
def bert_classes(model: Any) -> Split:
    """Batches are (tokens, mask, segments, labels)."""
    bert = model.bert
    head = Part(
        lambda x, _: model.classifier(model.dropout(bert.pooler(x))), bert.pooler, model.dropout, model.classifier
    )
    return _bert(bert, [head], loss=F.cross_entropy, correct=_right)


@ADAPTERS.register("BertForQuestionAnswering")
def bert_answers(model: Any) -> Split:
    """Batches are (tokens, mask, segments, start, end)."""
    return _bert(model.bert, [Part(lambda x, _: model.qa_outputs(x), model.qa_outputs)], loss=_ends, correct=_both_ends)


def _ends(scores: Tensor, start: Tensor, end: Tensor) -> Tensor:
    first, last = scores.unbind(-1)
    return (F.cross_entropy(first, start) + F.cross_entropy(last, end)) / 2


def _both_ends(scores: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, int]:
    first, last = scores.unbind(-1)
    return ((first.argmax(1) == start) & (last.argmax(1) == end)).sum(), len(scores)
