"""A small U-Net in PyTorch that segments discs and rings in noise, on images partitioned into one tile per rank.

mpirun -n 4 python examples/torch_unet.py [STEPS]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import neondist.torch as ndt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
HEIGHT, WIDTH = 157, 203  # not divisible by the number of tiles


class Block(nn.Sequential):
    def __init__(self, inputs, channels):
        once = (nn.Conv2d(inputs, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU(inplace=True))
        super().__init__(*once, nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, channels=6, classes=3):
        super().__init__()
        self.down = nn.ModuleList([Block(1, channels), Block(channels, 2 * channels)])
        self.bottom = Block(2 * channels, 4 * channels)
        self.up = nn.ModuleList([Block(6 * channels, 2 * channels), Block(3 * channels, channels)])
        self.last = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2, ceil_mode=True)
        x = self.bottom(x)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([skip, x], 1))
        return self.last(x)


def draw_sample(step):
    """Return the image (1, 1, HEIGHT, WIDTH) of a step, and the class of each cell (1, HEIGHT, WIDTH)."""
    generator = torch.Generator().manual_seed(step)
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    truth = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.long)
    for kind in (1, 2, 1, 2, 1, 2):
        row, column, radius = (torch.rand(3, generator=generator) * torch.tensor([HEIGHT, WIDTH, 25])).tolist()
        distance = ((rows - row) ** 2 + (columns - column) ** 2).sqrt()
        inside = distance < 6 + radius
        truth[0, inside if kind == 1 else inside & (distance > radius)] = kind
    return (truth[:, None] > 0) + 0.3 * torch.randn(1, 1, HEIGHT, WIDTH, generator=generator), truth


torch.set_default_dtype(torch.float64)  # so that all printed digits agree
torch.manual_seed(1)
model = ndt.distribute(UNet(), (1, 1, HEIGHT, WIDTH))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 2.0]))

for step in range(STEPS):
    image, truth = draw_sample(step)
    loss = model.loss(criterion, model(model.scatter(image)), model.scatter_target(truth))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if model.grid.rank == 0 and (step % 5 == 0 or step == STEPS - 1):
        print(f"step {step:3d}  loss {loss.item():.5f}", flush=True)
