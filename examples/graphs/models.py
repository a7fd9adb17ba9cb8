"""Write the models and the data that the trainers of this folder take: a use of PyTorch that they have no need of.

.venv/bin/python examples/graphs/models.py
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

FOLDER = Path(__file__).parent
TEXT = (FOLDER.parents[1] / "LICENSE").read_text()
LETTERS = sorted({*TEXT})
LENGTH, WIDTH, HEADS = 32, 32, 4


class Characters(nn.Module):  # type: ignore[misc]
    """A transformer of one block that reads characters, and guesses the next one at each place."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.guesses = nn.Linear(WIDTH, characters)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH).triu(1).bool())

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places.weight
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.heads(self.norms[0](x)).chunk(3, 2))
        scores = (q @ k.transpose(2, 3) / math.sqrt(WIDTH / HEADS)).masked_fill(self.later, -1e9)
        x = x + self.joined((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        x = x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))
        return self.guesses(self.norms[2](x)).transpose(1, 2)


def mlp() -> nn.Module:
    """Return a network that reads digits."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    """Return a network that reads digits as images."""
    convolutions = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions)


MODELS = {"mlp": (mlp, "digits"), "cnn": (cnn, "digits"), "chars": (lambda: Characters(len(LETTERS)), "text")}
"""Each model, and the name of its data."""


def made(name: str) -> nn.Module:
    """Return the model, with the weights of its file."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def data() -> dict[str, dict[str, Tensor]]:
    """Return the rows of the inputs of each data: 960 digits, and a licence in 320 lines of characters."""
    digits, labels = load_digits(return_X_y=True)
    codes = torch.tensor([LETTERS.index(letter) for letter in TEXT[: 320 * LENGTH + 1]])
    return {
        "digits": {"pixels": torch.tensor(digits[:960]).int(), "labels": torch.tensor(labels[:960])},
        "text": {"text": codes[:-1].reshape(-1, LENGTH), "labels": codes[1:].reshape(-1, LENGTH)},
    }


def main() -> None:
    """Write the files."""
    warnings.simplefilter("ignore")
    every = data()
    for name, rows in every.items():
        numbers = {key: tensor.tolist() for key, tensor in rows.items()}
        (FOLDER / f"{name}.json").write_text(json.dumps(numbers, separators=(",", ":")))
    for name, (_, of) in MODELS.items():
        (key, rows), _ = every[of].items()
        sample = rows[:2].float() if of == "digits" else rows[:2]
        names = {"input_names": [key], "output_names": ["scores"], "dynamic_shapes": ({0: "rows"},)}
        # The optimizer makes one weight of those that begin equal, such as those of norms, and folds others.
        program = torch.onnx.export(made(name), (sample,), dynamo=True, optimize=False, verbose=False, **names)
        assert program is not None
        program.save(FOLDER / f"{name}.onnx")


if __name__ == "__main__":
    main()
