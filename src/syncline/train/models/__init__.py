"""Models by name, each in the published shape and in small sizes for a CPU."""

from syncline.train.models import bert, gpt2, image_classifiers, lstm, transformer, ugatit, vit
from syncline.train.models.base import MODELS, Blueprint, Built, Classifier, Phase, Task
from syncline.train.models.optimizers import OPTIMIZERS, load_optimizer

__all__ = ["MODELS", "OPTIMIZERS", "Blueprint", "Built", "Classifier", "Phase", "Task", "load_optimizer"]
_BUILT_IN = (bert, gpt2, image_classifiers, lstm, transformer, ugatit, vit)
