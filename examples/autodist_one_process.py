"""The introductory example of AutoDist in PyTorch, on the embedded digits; distributed by autodist.py.

python examples/autodist_one_process.py [STEPS]
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import neondist as nd

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
BATCH_SIZE = 32

torch.set_default_dtype(torch.float64)  # so that all printed digits agree
torch.manual_seed(0)
digits = nd.MNIST()
digits.open(nd.ProcessGrid.serial())
images = torch.from_numpy(digits.train.images(np.arange(2000), "float64")).movedim(-1, 1)
labels = torch.from_numpy(digits.train.targets(np.arange(2000)))
loader = DataLoader(TensorDataset(images, labels), BATCH_SIZE, shuffle=True)

features = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
model = nn.Sequential(*features, nn.Linear(32 * 13 * 13, 64), nn.ReLU(), nn.Linear(64, 10))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


for step, (x, y) in enumerate(loader):
    if step == STEPS:
        break
    loss = train_step(x, y)
    print(f"step: {step}, train_loss: {loss.item():.9f}", flush=True)
