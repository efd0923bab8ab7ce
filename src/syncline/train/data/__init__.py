"""Data sets by name: generated images, Fashion-MNIST, CIFAR, text, labelled texts, questions, synthetic tensors."""

from syncline.train.data import cifar, fashion_mnist, shapes, synthetic, text, text_files
from syncline.train.data.base import DATA, Batch, Data, Dataset, Need, Source, data
from syncline.train.data.load import load_data

__all__ = ["DATA", "Batch", "Data", "Dataset", "Need", "Source", "data", "load_data"]
_BUILT_IN = (cifar, fashion_mnist, shapes, synthetic, text, text_files)
