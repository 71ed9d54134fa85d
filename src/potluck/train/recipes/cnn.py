"""Owns the recipe `cnn`: a small convolutional net that learns to read digits.

Defines the model, its data, and how the result is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from potluck.bounds import LARGEST, Amount, Long, Natural, Positive
from potluck.errors import ConfigError
from potluck.train.recipes import idx
from potluck.train.recipes.modes import Precision, evaluating, fused, precision
from potluck.train.recipes.schedule import warmup_cosine

if TYPE_CHECKING:
    from potluck.train.recipes import Recipe

CLASSES = 10
_EVALUATION_BATCH = 256
_HELD_OUT_EVERY = 6


class CnnConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the recipe `cnn`."""

    width: Annotated[int, Meta(ge=4, le=LARGEST)] = 32
    """Channels after the first convolution, a multiple of 4; the later ones have twice as many."""

    global_batch: Positive = 64
    """Images per step, over all machines."""

    steps: Positive = 300
    """Total number of optimizer steps."""

    lr: Annotated[float, Meta(gt=0, lt=1e9)] = 3e-3
    """Peak learning rate."""

    weight_decay: Amount = 0.01
    """Weight decay of AdamW."""

    clip_norm: Amount = 1.0
    """Largest norm of the gradient, which is scaled down to it; 0: no limit."""

    precision: Precision = "fp32"
    """Number format of convolutions and matrix products (autocast). Weights stay fp32."""

    data: Long | None = None
    """A folder with MNIST's IDX files, plain or .gz; if not given, the 8x8 digits of scikit-learn."""

    enlarge: Annotated[int, Meta(ge=1, le=256)] = 1
    """Repeat every pixel this many times in both directions, and undo that on the device, to measure the cost of
    large samples. With 49 an image of 8x8 has 154 kB; the training is the same."""

    seed: Natural = 1
    """Random seed for the weights and the sample order."""

    def __post_init__(self) -> None:
        if self.width % 4:
            raise ConfigError(f"width is {self.width}", hint="width must be a multiple of 4, for example 32")


class DigitNet(nn.Module):
    """Three convolutions, pooled to 4x4 whatever the image's size, then two layers.

    Normalised within each sample (GroupNorm): how a batch is split over machines changes nothing.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, 1, height, width) in 0..1 -> scores (batch, 10)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Samples: an image (height, width) of uint8 and its digit, an int64 without dimensions."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, enlarge: int = 1) -> None:
        self._enlarge = enlarge
        self._images = torch.from_numpy(images.copy())  # torch wants memory that it could write to
        self._labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        image = self._images[index]
        if (times := self._enlarge) > 1:
            height, width = image.shape
            image = image[:, None, :, None].expand(height, times, width, times).reshape(height * times, -1)
        return image, self._labels[index]

    def enlarged(self, times: int) -> Digits:
        """The same digits as larger images."""
        return Digits(self._images.numpy(), self._labels.numpy(), times)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Several samples, as torch's DataLoader asks for them: a list, not yet stacked."""
        return [self[index] for index in indices]

    def batches(self, size: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """All samples in order, in stacked batches."""
        images, labels = torch.split(self._images, size), torch.split(self._labels, size)
        return [(image.to(device), label.to(device)) for image, label in zip(images, labels)]


class CnnRecipe:
    """Everything a run of the digit reader needs."""

    name = "cnn"
    Config = CnnConfig

    def model(self, config: CnnConfig) -> DigitNet:
        """The initial net, on the CPU, the same for the same seed. The caller's random generators do not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return DigitNet(config.width)

    def compile(self, model: nn.Module, config: CnnConfig, device: torch.device, *, guest: bool) -> None:
        """Does nothing: the model is too small to gain from it."""

    def optimizer(self, model: nn.Module, config: CnnConfig) -> torch.optim.AdamW:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        one_pass = fused(trained) or None
        return torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=one_pass)

    def scheduler(self, optimizer: torch.optim.Optimizer, config: CnnConfig) -> LambdaLR:
        """Rises over a tenth of the run, then falls to nearly zero."""
        return warmup_cosine(optimizer, steps=config.steps, warmup=config.steps // 10, floor=0.001)

    def dataset(self, config: CnnConfig) -> Digits:
        digits = _load(config.data)[0]
        return digits.enlarged(config.enlarge) if config.enlarge > 1 else digits

    def loss(self, model: nn.Module, batch: Sequence[Tensor], config: CnnConfig) -> Tensor:
        """Mean cross entropy. batch: images (samples, height, width) of uint8, labels (samples,) of int64."""
        images, labels = batch
        images = images[:, :: config.enlarge, :: config.enlarge]
        return F.cross_entropy(_scores(model, images, config), labels)

    def tokens_per_sample(self, config: CnnConfig) -> int | None:
        return None

    def validation(self, model: nn.Module, config: CnnConfig, device: torch.device) -> float | None:
        """The share of held-out images that are read right."""
        right, total = self._count_right(model, config, device)
        return right / total

    def finish(self, model: nn.Module, config: CnnConfig, device: torch.device) -> str:
        right, total = self._count_right(model, config, device)
        return f"{right:,} of {total:,} held-out digits read right: {100 * right / total:.1f} %"

    def _count_right(self, model: nn.Module, config: CnnConfig, device: torch.device) -> tuple[int, int]:
        held_out = _load(config.data)[1]
        right = 0
        with evaluating(model):
            for images, labels in held_out.batches(_EVALUATION_BATCH, device):
                right += int((_scores(model, images, config).argmax(dim=1) == labels).sum())
        return right, len(held_out)


def _scores(model: nn.Module, images: Tensor, config: CnnConfig) -> Tensor:
    with precision(images.device, config.precision):
        scores: Tensor = model(images.unsqueeze(1).float() / 255)
    return scores.float()


@functools.lru_cache(maxsize=1)
def _load(data: str | None) -> tuple[Digits, Digits]:
    """Samples for training and held-out ones; every sixth is held out where no test set comes with them."""
    if data is not None:
        folder = Path(data).expanduser()
        training, test = idx.read_mnist(folder)
        if test is not None:
            return Digits(*training), Digits(*test)
        images, labels = training
    else:
        images, labels = _sklearn_digits()
    held_out = np.arange(len(labels)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def _sklearn_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the recipe cnn takes its digits from scikit-learn, which is not installed",
            hint="pip install -e '.[digits]', or give a folder with MNIST's files: --data DIR",
        ) from error
    digits = load_digits()
    return np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target


RECIPE: Recipe = CnnRecipe()
